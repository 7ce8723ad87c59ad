"""The loss scale of float16: gradients below 6e-8 would be 0, so the loss is multiplied, and the scale follows."""

#: Steps with an update after which the scale is doubled, as torch.amp.GradScaler does.
GROW_AFTER = 2000


class LossScale:
    """A dynamic scale, the same on all ranks because they agree on the gradient's norm. 1 where nothing is scaled.

    Source: Micikevicius et al., Mixed Precision Training (ICLR 2018), section 3.2.
    """

    def __init__(self, first: float, dynamic: bool) -> None:
        self.value = first if dynamic else 1.0
        self.dynamic = dynamic
        self.skipped = 0  # steps without an update, of the whole run
        self.good_steps = 0  # steps with one since the scale last changed

    def overflowed(self) -> bool:
        """The gradient is not finite: whether this step is skipped, with a lower scale from now on.

        At a scale of 1 there is nothing to lower: the gradient itself does not fit.
        """
        if not self.dynamic or self.value <= 1.0:
            return False
        self.value = max(1.0, self.value / 2)
        self.skipped += 1
        self.good_steps = 0
        return True

    def updated(self) -> None:
        """After an update: the scale is raised now and then."""
        if not self.dynamic:
            return
        self.good_steps += 1
        if self.good_steps == GROW_AFTER:
            self.value *= 2
            self.good_steps = 0
