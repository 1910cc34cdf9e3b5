"""One micro-batch of one replica: the step, and, where it returns a loss, backward and update."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from helios.errors import UsageError
from helios.loops.loop import Loop, make_stray_stop

_CONTRACT = (
    "train_step must return a scalar loss tensor, a dict with one under 'loss', or None when the "
    "model does backward and steps its optimizers itself"
)


def _as_loss(result: Any) -> Tensor | None:
    if result is None:
        return None
    loss = result["loss"] if isinstance(result, dict) and "loss" in result else result
    if isinstance(loss, Tensor):
        return loss
    raise UsageError(f"{_CONTRACT}, got {type(loss).__name__}.")


def _make_loss_error(loss: Tensor) -> UsageError:
    return UsageError(
        f"{_CONTRACT}; got a tensor of shape {tuple(loss.shape)} with requires_grad="
        f"{loss.requires_grad}. Reduce it (loss.mean()) and do not detach it."
    )


class OptimizerLoop(Loop):
    """The default optimizer loop: automatic or manual, as ``train_step`` returns (C12)."""

    def __init__(self) -> None:
        super().__init__()
        self._is_done = False
        self._is_committed = True
        self._optimizer: Optimizer | None = None
        self._attribute: tuple[str, Any] = ("", None)
        self._has_begun = False

    @property
    def done(self) -> bool:
        """Whether the micro-batch is done."""
        return self._is_done

    def reset(self) -> None:
        """Prepare for one micro-batch."""
        self._is_done = False

    def advance(self, batch: Any) -> None:
        """Run the step; in automatic mode do backward and, at a boundary, the update."""
        session = self.session
        self._is_done = True
        model = session.model
        try:
            loss = _as_loss(model.train_step(batch, session.state))
        except StopIteration as error:
            raise make_stray_stop(error) from error
        if not self._has_begun:
            self._begin(is_manual=loss is None)
        if session.is_manual is not (loss is None):
            raise self._make_mode_error()
        if loss is None:
            return
        if not loss.requires_grad or loss.numel() != 1:
            raise _make_loss_error(loss)
        if not model.loss_items:
            model.loss_items["loss"] = loss.detach()
        session.hooks.emit("on_backward_start", loss)
        session.engine.backward(loss)
        session.hooks.emit("on_backward_end")
        if session.state.is_step_boundary:
            self._update()

    def on_run_end(self) -> bool:
        """Return whether the last update was committed."""
        return self._is_committed

    def _make_mode_error(self) -> UsageError:
        before, now = ("None", "a loss")[:: 1 if self.session.is_manual else -1]
        return UsageError(
            f"{type(self.session.model).__name__}.train_step returned {now} after it had returned "
            f"{before}; it must keep to one of both. To train on nothing, return a loss of zero."
        )

    def _begin(self, *, is_manual: bool) -> None:
        session = self.session
        self._has_begun = True
        if session.is_manual is None:
            session.is_manual = is_manual
            session.state.is_step_boundary |= is_manual and session.schedule.is_by_epoch
        if is_manual:
            session.warn_of_automatic_options()

    def _find_optimizer(self) -> Optimizer:
        """Return the one optimizer; look again where its attribute holds another object."""
        attributes = vars(self.session.model)
        name, holder = self._attribute
        if self._optimizer is None or attributes.get(name) is not holder:
            path, self._optimizer = self._discover_optimizer()
            name = path.partition(".")[0]
            self._attribute = (name, attributes[name])
        return self._optimizer

    def _discover_optimizer(self) -> tuple[str, Optimizer]:
        optimizers = self.session.model.discovery.optimizers()
        if len(optimizers) != 1:
            raise UsageError(
                "When train_step returns a loss, the model must have exactly one optimizer as an "
                f"attribute, found {sorted(optimizers) or 'none'}. For several, let train_step "
                "do backward and step them itself and return None, or use a YieldLoop."
            )
        return next(iter(optimizers.items()))

    def _update(self) -> None:
        session, engine, hooks = self.session, self.session.engine, self.session.hooks
        optimizer = self._find_optimizer()
        engine.average_gradients(optimizer)
        hooks.emit("on_optimizer_step_start", optimizer)
        engine.clip_gradients(optimizer)
        self._is_committed = engine.optimizer_step(optimizer)
        if session.schedulers is not None and self._is_committed:
            session.schedulers.after_step()
        hooks.emit("on_before_zero_grad", optimizer)
        engine.zero_grad(optimizer)
        hooks.emit("on_optimizer_step_end", optimizer, self._is_committed)

    def teardown(self) -> None:
        """Forget the optimizer of this training."""
        self._optimizer = None
        self._has_begun = False
        super().teardown()

    def state_dict(self) -> dict[str, Any]:
        """Return whether the steps are manual, so that a resume knows it before its first step."""
        return {"is_manual": self.session.is_manual}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the mode."""
        self.session.is_manual = state_dict["is_manual"]
