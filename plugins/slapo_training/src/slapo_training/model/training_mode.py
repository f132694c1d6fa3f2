"""Training and evaluation mode of a whole model."""

from __future__ import annotations

from torch import nn


class TrainingMode:
    """Switches a model between its modes; what a user froze by ``.eval()`` on a part stays frozen in training.

    A model given in evaluation mode, as ``from_pretrained`` gives it, trains as a whole.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._frozen = [m for m in root.modules() if not m.training] if root.training else []

    def set(self, training: bool) -> None:
        """Switch, where the model is not in that mode already."""
        if self._root.training != training:
            self._root.train(training)
            self.restore_frozen()

    def restore_frozen(self) -> None:
        """Put what is frozen back, after others have switched the whole model."""
        for module in self._frozen:
            module.training = False
