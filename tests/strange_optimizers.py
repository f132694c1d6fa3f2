"""Optimizers as people write them for one process, for tests of what becomes of them where ranks hold parts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

Parameters = Iterable[nn.Parameter]


class Plain(torch.optim.Optimizer):
    """Base of those that update one parameter after the other."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def held(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group, self.state[parameter]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, group, state in self.held():
            parameter.add_(self.update(parameter, parameter.grad, state, group), alpha=-group["lr"])  # type: ignore[arg-type]

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


def momentum_of(state: dict[str, Any], gradient: torch.Tensor, beta: float = 0.9) -> torch.Tensor:
    kept = state.setdefault("momentum", torch.zeros_like(gradient))
    return kept.mul_(beta).add_(gradient, alpha=1 - beta)  # type: ignore[no-any-return]


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.size(-2) > matrix.size(-1) else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(-2) > matrix.size(-1) else x


class KellerMuon(torch.optim.Optimizer):
    """Muon with an auxiliary Adam in one class, which steps what has no gradient as if that were zero."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        for group in param_groups:
            group.setdefault("lr", 0.02 if group["use_muon"] else 0.01)
            group.setdefault("weight_decay", 0.01)
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                update = momentum_of(self.state[p], p.grad)
                if group["use_muon"]:
                    update = orthogonal(update) * max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"])

    @classmethod
    def of(cls, parameters: Parameters) -> KellerMuon:
        held = list(parameters)
        matrices, others = [p for p in held if p.ndim >= 2], [p for p in held if p.ndim < 2]
        return cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


class MarkedMuon(torch.optim.Optimizer):
    """Muon that knows its matrices by marks in the state, the last of the matrices alone."""

    def __init__(self, parameters: Parameters, lr: float = 0.01) -> None:
        held = list(parameters)
        super().__init__(held, {"lr": lr})
        matrices = [p for p in held if p.ndim == 2]
        chosen = {id(p) for p in matrices[2:]}
        for p in held:
            self.state[p]["use_muon"] = id(p) in chosen

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = momentum_of(self.state[p], p.grad)
                    p.add_(orthogonal(update) if self.state[p]["use_muon"] else update, alpha=-group["lr"])


class ListedMuon(Plain):
    """Muon that knows its matrices by a set of ids."""

    def __init__(self, parameters: Parameters, lr: float = 0.01) -> None:
        held = list(parameters)
        super().__init__(held, lr)
        self.matrices = {id(p) for p in held if p.ndim == 2}

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return orthogonal(momentum_of(state, g)) if id(p) in self.matrices else momentum_of(state, g)


class Wrapper(torch.optim.Optimizer):
    """Averages weights of another optimizer, whose groups it has; it does not call its base's ``__init__``."""

    def __init__(self, parameters: Parameters) -> None:
        self.base = KellerMuon.of(parameters)
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
        self.state: Any = {}
        self.number = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.number += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state.setdefault(p, {"slow": p.detach().clone()})["slow"]
                if self.number % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class Composite(torch.optim.Optimizer):
    """Two optimizers in one, each with a state of its own."""

    def __init__(self, parameters: Parameters) -> None:
        held = list(parameters)
        super().__init__(held, {})
        self.parts = {"matrices": Shampoo([p for p in held if p.ndim == 2], lr=0.01)}
        if others := [p for p in held if p.ndim != 2]:
            self.parts["others"] = torch.optim.AdamW(others, lr=0.01, eps=1e-3)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            part.step()


class Lars(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return g * (p.norm() / (g.norm() + 1e-8))


class Lamb(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        square = state.setdefault("square", torch.zeros_like(p)).mul_(0.99).addcmul_(g, g, value=0.01)
        step = momentum_of(state, g) / (square.sqrt() + 1e-3) + 0.01 * p
        return step * (p.norm().clamp(max=10) / step.norm())  # type: ignore[no-any-return]


class Shampoo(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        for dim in range(g.ndim):
            rows = g.movedim(dim, 0).reshape(g.shape[dim], -1)
            kept = state.setdefault(f"factor_{dim}", 1e-2 * torch.eye(g.shape[dim], device=g.device))
            kept.add_(rows @ rows.T)
            values, vectors = torch.linalg.eigh(kept)
            root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-0.5 / g.ndim)) @ vectors.T
            g = torch.tensordot(root, g, dims=([1], [dim])).movedim(0, dim)
        return g


class Centralised(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return g - g.mean(dim=tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g


class Factored(Plain):
    """Adafactor in short: means of rows and of columns stand for the squares of a matrix."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        if g.ndim < 2:
            return momentum_of(state, g)
        for dim in (0, 1):
            mean = g.square().mean(dim, keepdim=True)
            kept = state.setdefault(f"mean_{dim}", torch.zeros_like(mean)).mul_(0.9).add_(mean, alpha=0.1)
            g = g / (kept.sqrt() + 1e-3).sqrt()
        return g / (g.square().mean().sqrt() + 1e-3).clamp(min=1)


class DecaysMatrices(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return momentum_of(state, g) + (0.5 * p if p.ndim >= 2 else 0)


class Lion(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        kept = state.setdefault("momentum", torch.zeros_like(p))
        update = (0.9 * kept + 0.1 * g).sign()
        kept.mul_(0.99).add_(g, alpha=0.01)
        return update + 0.1 * p


class Adan(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        before = state.get("before", g.clone())
        difference = momentum_of(state.setdefault("other", {}), g - before)
        state["before"] = g.clone()
        return (momentum_of(state, g) + 0.9 * difference) / (g.abs() + 1e-2)


class Sophia(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        kept = state.setdefault("hessian", torch.zeros_like(p)).mul_(0.9).addcmul_(g, g, value=0.1)
        return (momentum_of(state, g) / (kept + 1e-3)).clamp(-1, 1)


class ScheduleFree(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        for p, group, state in self.held():
            z = state.setdefault("z", p.detach().clone())
            z.sub_(p.grad, alpha=group["lr"])
            p.lerp_(z, 1 / group["k"])


class Scaled(Plain):
    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return g * getattr(p, "lr_scale", 1.0)


class Counting(Plain):
    """Adam as people write it: elementwise, and one count of steps for all parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.t = 0

    @classmethod
    def of(cls, parameters: Parameters) -> Counting:
        held = list(parameters)
        return cls([{"params": held[::2], "lr": 0.02}, {"params": held[1::2]}])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        super().step()

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(g, 0.1)
        square = state.setdefault("square", torch.zeros_like(p)).mul_(0.99).addcmul_(g, g, value=0.01)
        return (mean / (1 - 0.9**self.t)) / ((square / (1 - 0.99**self.t)).sqrt() + 1e-3)


class Lookahead(torch.optim.Optimizer):
    """Wraps another one, shares its groups, and has copies of the weights from the start."""

    def __init__(self, parameters: Parameters) -> None:
        held = list(parameters)
        self.base = Lars(held, lr=0.05)
        super().__init__(held, {})
        self.param_groups = self.base.param_groups
        self.slow = {p: p.detach().clone() for p in held}
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.number += 1
        if self.number % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    self.slow[p].lerp_(p, 0.5)
                    p.copy_(self.slow[p])


class Prodigy(Plain):
    """Its step depends on sums over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = sum(float(p.grad.double().square().sum()) for p, _, _ in self.held())  # type: ignore[union-attr]
        for group in self.param_groups:
            group["d"] = max(group.get("d", 0.1), total**0.5)
        for p, group, _ in self.held():
            p.sub_(p.grad, alpha=group["lr"] / group["d"])  # type: ignore[arg-type]


class ClipsItself(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        super().step()


class Noisy(Plain):
    """Langevin dynamics, with a generator of its own or torch's."""

    def __init__(self, params: Any, own: bool) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3) if own else None

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return g + 0.1 * torch.randn(p.shape, generator=self.generator)


def hugging_face_adafactor(parameters: Parameters) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(list(parameters), lr=0.02, scale_parameter=True, relative_step=False, warmup_init=False)  # type: ignore[no-any-return]


def groups_of(parameters: Parameters) -> torch.optim.Optimizer:
    """Two groups by what is usual."""
    held = list(parameters)
    matrices, others = [p for p in held if p.ndim > 1], [p for p in held if p.ndim < 2]
    return Lamb([{"params": matrices, "lr": 0.01}, {"params": others}])


def coupled_groups(parameters: Parameters) -> torch.optim.Optimizer:
    """One that sums over all, with two groups."""
    held = list(parameters)
    return Prodigy([{"params": held[:2]}, {"params": held[2:]}])


Factory = Callable[[Parameters], torch.optim.Optimizer]


class ByPlace(torch.optim.Optimizer):
    """Has its momenta in a list from the start, by the place of a parameter among all."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.momenta = [torch.zeros_like(parameter) for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        stepped = [(parameter, group["lr"]) for group in self.param_groups for parameter in group["params"]]
        for place, (parameter, rate) in enumerate(stepped):
            if parameter.grad is not None:
                parameter.add_(self.momenta[place].mul_(0.9).add_(parameter.grad), alpha=-rate)


class Groupwise(torch.optim.Optimizer):
    """Normalises the gradients of each group at once, and fails where a group has none."""

    @classmethod
    def of(cls, parameters: Parameters) -> Groupwise:
        split = [list[nn.Parameter](), list[nn.Parameter]()]
        for parameter in parameters:
            split[parameter.dim() > 1].append(parameter)
        return cls([{"params": each, "lr": 0.02 if number else 0.01} for number, each in enumerate(split) if each], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in stepped if parameter.grad is not None]
            norms = torch._foreach_norm(gradients)
            torch._foreach_add_(norms, 1e-3)
            torch._foreach_add_(stepped, torch._foreach_div(gradients, norms), alpha=-group["lr"])


WHOLE: dict[str, Factory] = {
    "groupwise": Groupwise.of,
    "muon": KellerMuon.of,
    "marked muon": MarkedMuon,
    "listed muon": ListedMuon,
    "wrapper": Wrapper,
    "composite": Composite,
    "lars": Lars,
    "lamb": groups_of,
    "shampoo": partial(Shampoo, lr=0.01),
    "centralised": Centralised,
    "factored": Factored,
    "lookahead": Lookahead,
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "hugging face": hugging_face_adafactor,
}
"""The update of one element depends on others of the tensor."""
ELEMENTWISE: dict[str, Factory] = {
    "lion": Lion,
    "adan": Adan,
    "sophia": Sophia,
    "schedule free": ScheduleFree,
    "counting": Counting.of,
    "adamw": partial(torch.optim.AdamW, eps=1e-3),
    "rprop": torch.optim.Rprop,
    "adagrad": torch.optim.Adagrad,
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
BY_SHAPE: dict[str, Factory] = {"decays matrices": DecaysMatrices, "scaled": Scaled}
"""Each element is stepped alone, but by what a flattened parameter has not."""
COUPLED: dict[str, Factory] = {
    "prodigy": Prodigy,
    "clips itself": partial(ClipsItself, lr=0.01, eps=1e-3),
    "coupled groups": coupled_groups,
    "own noise": partial(Noisy, own=True),
    "noise": partial(Noisy, own=False),
    "by place": ByPlace,
}
"""The update of one parameter depends on which others there are."""
EVERY = {**WHOLE, **ELEMENTWISE, **BY_SHAPE, **COUPLED}
