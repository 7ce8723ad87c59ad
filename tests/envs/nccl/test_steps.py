"""What a step is: sequences of backward passes and optimizer steps as training loops make them."""

import pytest
import torch
from dynamiccl.envs.nccl.steps.steps import Steps


class Optimizer:
    """Stands for one; identity is all that counts."""


def boundaries(program: str) -> str:
    """``b`` a backward pass, ``.`` a collective, letters an optimizer's step: the boundaries in upper case."""
    return run(program)[0]


def run(program: str) -> tuple[str, int, int]:
    """The same, and the backward passes and boundaries that are counted."""
    asked, optimizers, said = 0, {}, ""
    steps = Steps(lambda: asked)
    for what in program.replace(" ", ""):
        if what == "b":
            steps.begun()
            continue
        if what == ".":
            asked += 1
            continue
        is_one = steps.stepped(optimizers.setdefault(what, Optimizer()))
        said += what.upper() if is_one else what
    return said, steps.backwards, steps.ended


@pytest.mark.parametrize(
    ("name", "program", "expected"),
    [
        ("one optimizer", "ba ba ba", "AAA"),
        ("accumulation", "bbba bbba", "AA"),
        ("a wrapper fires twice; DeepSpeed steps each group", "baaa baaa", "AaaAaa"),
        ("Megatron steps inner optimizers one after another", "bxyz bxyz bxyz", "XyzXyzXyz"),
        ("a scaler leaves out a step on all ranks", "ba b ba", "AA"),
        ("two models in turn", "ba bc ba bc ba bc", "AcAcAc"),
    ],
)
def test_a_boundary_needs_new_work(name, program, expected):
    assert boundaries(program) == expected


@pytest.mark.parametrize("order", ["bd bd bd bd bd bg", "bg bd bd bd bd bd"])
def test_a_gans_step_goes_from_one_generator_step_to_the_next(order):
    """Five critic steps and one of the generator are one step of the job, whichever comes first."""
    assert boundaries(order * 6)[12:] == boundaries(order.replace(" ", "") * 6)[12:]
    settled = boundaries(order * 6)[-12:]
    assert settled.count("G") == 2 and "D" not in settled


def test_an_optimizer_that_hardly_steps_is_not_the_rhythm_and_one_that_is_replaced_is():
    assert boundaries(("ba" * 40 + "bx") * 3)[-41:] == "A" * 40 + "x"
    assert boundaries("ba" * 20 + "bc" * 20)[-18:] == "C" * 18


@pytest.mark.parametrize(
    ("name", "job", "rank_0"),
    [
        ("a linear probe is fitted after some steps", ".b.a .b.a .b.a .b.a", ".b.a .b.a bpbpbp .b.a .b.a"),
        ("after a collective that no step waited for", ".b.a. .b.a. .b.a.", ".b.a. bp .b.a. bpbp .b.a."),
        ("a model of its own beside each step", ".b.a .b.a .b.a", ".b.a be .b.a be .b.a be"),
        ("beside a GAN", "b.d b.d b.g " * 9, "b.d b.d b.g be " * 9),
        ("beside accumulation", "bb.a bb.a", "bb.a be bb.a"),
    ],
)
def test_what_one_rank_does_for_itself_makes_no_step_and_no_backward_pass(name, job, rank_0):
    said, *counted = run(rank_0)
    assert ("".join(c for c in said if c not in "pePE"), *counted) == run(job), name


@pytest.mark.parametrize(
    "program",
    [
        "ba ba ba",  # nothing counts collectives
        "..ba ba ba",  # parameters are averaged once in a while, gradients never
        "b.a ba ba",  # captured into a graph after the first step: nobody asks any more
        "ba. ba. ba.",  # reduced after the step, for the next one
    ],
)
def test_a_step_counts_where_no_other_optimizer_or_it_itself_has_shared_its_gradients(program):
    assert boundaries(program) == "AAA"


@pytest.mark.parametrize("alone", ["bpbpbp", ". bpbp bebebe", "bp" * 30])
def test_what_a_rank_did_for_itself_before_training_is_counted_but_soon_no_rhythm(alone):
    """Nothing shows yet that it is this rank's own. Steps are for measuring, so they need not be the others'."""
    said, backwards, ended = run(alone + ".b.a" * 40 + "bp be" + ".b.a" * 3)
    private = alone.count("b")
    assert said[-5:] == "peAAA" and said[-15:-5] == "A" * 10
    assert backwards == private + 43 and ended == sum(c.isupper() for c in said)


def test_without_backward_passes_an_optimizer_that_steps_again_makes_the_boundary():
    steps, one, two = Steps(), Optimizer(), Optimizer()
    assert [steps.stepped(o) for o in (one, two, one, two, one)] == [False, False, True, False, True]


def test_pytorchs_backward_passes_are_counted_once_each():
    """Autograd's, LBFGS's closures, a direct call of the engine; nested passes are parts of the outer one."""
    steps = Steps()
    engine = torch.autograd.Variable._execution_engine
    try:
        steps.watch(torch)
        x = torch.ones(3, requires_grad=True)
        x.sum().backward()
        torch.autograd.grad((x * 2).sum(), x)
        assert steps.backwards == 2
        torch.utils.checkpoint.checkpoint(lambda v: (v * 2).sum(), x, use_reentrant=True).backward()
        assert steps.backwards == 3, "a reentrant checkpoint's pass is a part of the outer one"
        loss = (x * 3).sum()
        run = torch.autograd.Variable._execution_engine.run_backward
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        assert steps.backwards == 4, "as Megatron calls it"
        before = steps.backwards
        optimizer = torch.optim.LBFGS([x], max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = (x * x).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert steps.backwards > before and steps.stepped(optimizer) and not steps.stepped(optimizer)
        with pytest.raises(RuntimeError):
            torch.ones(3).sum().backward()
        x.sum().backward()
        assert steps.stepped(optimizer), "a pass that failed left nothing behind"
    finally:
        torch.autograd.Variable._execution_engine = engine
