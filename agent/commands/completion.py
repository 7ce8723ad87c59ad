"""``dynamiccl completion``: commands and options at the press of Tab."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from . import argument, command


@command
@argument("shell", type=click.Choice(["bash", "zsh", "fish"]), help="bash, zsh or fish.")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell: commands, options and files at the press of Tab.

    \b
    eval "$(dynamiccl completion bash)"    # in ~/.bashrc
    eval "$(dynamiccl completion zsh)"     # in ~/.zshrc
    dynamiccl completion fish | source     # in ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    print(made(ctx.find_root().command, {}, "dynamiccl", "_DYNAMICCL_COMPLETE").source())
