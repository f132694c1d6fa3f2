"""Training and evaluation mode of a whole model."""

from __future__ import annotations

from torch import nn


class TrainingMode:
    """Switches a model between its modes; modules that the user set to ``.eval()`` stay in evaluation mode.

    A model that is in evaluation mode as a whole, e.g. from ``from_pretrained``, trains as a whole.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._frozen = [m for m in root.modules() if not m.training] if root.training else []

    def set(self, training: bool) -> None:
        """Switch the mode if the model is in the other one."""
        if self._root.training != training:
            self._root.train(training)
            self.restore_frozen()

    def restore_frozen(self) -> None:
        """Set the frozen modules to evaluation mode again, after a switch of the whole model."""
        for module in self._frozen:
            module.training = False
