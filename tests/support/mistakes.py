"""Mistakes in what users extend: loops, yields, engines, plugins, channels, processors.

Each is a small training with one mistake; :func:`first_lines` tells what its user sees first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from helios import DataLoaderParams, DataModule, Engine, Model, Plugin, Trainer
from helios.loops import BatchLoop, EpochLoop, OptimizerLoop, YieldLoop
from helios.model import BatchProcessor
from helios.plugins import HookContext, PipelineHooks
from tests.support.warned import collect_warnings

PAGE = Path(__file__).parents[1] / "golden" / "mistakes.txt"
MISTAKES: dict[str, Callable[[], Any]] = {}


class Data(DataModule):
    """Four samples, two batches."""

    def setup(self) -> None:
        x = torch.arange(4.0).reshape(4, 1)
        self._train_dataset = self._create_dataset(
            TensorDataset(x, 2 * x), DataLoaderParams(batch_size=2)
        )


class Line(Model):
    """One network, one optimizer, one loss."""

    def setup(self, fast_init: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def train_step(self, batch: Any, state: Any) -> Any:
        return mse_loss(self.net(batch[0]), batch[1])


class Pair(Model):
    """Two networks with an optimizer each; the losses are yielded."""

    def setup(self, fast_init: bool = False) -> None:
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.optimizer_a = torch.optim.SGD(self.first.parameters(), lr=0.01)
        self.optimizer_b = torch.optim.SGD(self.second.parameters(), lr=0.01)

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.first(batch[0]).square().mean(), self.second(batch[0]).square().mean()

    def train_step(self, batch: Any, state: Any) -> Any:
        yield from self.losses(batch)


class Two(Pair):
    """The same, with a dict of losses."""

    def train_step(self, batch: Any, state: Any) -> Any:
        return dict(zip("ab", self.losses(batch), strict=True))


def fit(
    model: Model | None = None,
    *plugins: Any,
    loop: Any = None,
    batch_loop: Any = None,
    epoch_loop: Any = None,
    **options: Any,
) -> None:
    """Train for two steps."""
    where = {} if "engine" in options else {"use_cpu": True}
    given = {"total_steps": 2, "train_unit": "iteration", "print_banner": False}
    trainer = Trainer(plugins=list(plugins), **{**given, **where, **options})
    if epoch_loop is not None:
        trainer.fit_loop.connect(epoch_loop=epoch_loop)
    if batch_loop is not None:
        trainer.fit_loop.epoch_loop.connect(batch_loop=batch_loop)
    if loop is not None:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=loop)
    trainer.fit(model or Line("line"), Data())


def mistake(text: str, run: Callable[[], Any]) -> None:
    """Add a mistake."""
    assert text not in MISTAKES, text
    MISTAKES[text] = run


class Own(Plugin):
    """A plugin with an id."""

    def __init__(self, plug_id: str = "own") -> None:
        super().__init__(plug_id)

    def setup(self) -> None: ...


def loop(text: str, model: type[Model] = Line, **options: Any) -> Callable[[type], type]:
    """Add the mistake that a loop has."""

    def add(kind: type) -> type:
        role = "batch_loop" if issubclass(kind, BatchLoop) else "loop"
        role = "epoch_loop" if issubclass(kind, EpochLoop) else role
        mistake(f"loop: {text}", lambda: fit(model("line"), **{role: kind()}, **options))
        return kind

    return add


def model(text: str, **options: Any) -> Callable[[type[Model]], type[Model]]:
    """Add the mistake that a model has."""

    def add(kind: type[Model]) -> type[Model]:
        mistake(f"model: {text}", lambda: fit(kind("line"), **options))
        return kind

    return add


def engine(text: str, **options: Any) -> Callable[[type], type]:
    """Add the mistake that an engine has."""

    def add(kind: type) -> type:
        mistake(f"engine: {text}", lambda: fit(engine=kind("cpu"), **options))
        return kind

    return add


def plugin(text: str, **options: Any) -> Callable[[type], type]:
    """Add the mistake that a plugin has."""

    def add(kind: type) -> type:
        mistake(f"plugin: {text}", lambda: fit(None, kind(), **options))
        return kind

    return add


def processor(text: str, **options: Any) -> Callable[[type], type]:
    """Add the mistake that a batch processor has."""

    def add(kind: type) -> type:
        class Processing(Model):
            def setup(self, fast_init: bool = False) -> None:
                self.net = nn.Linear(1, 1)
                self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
                self.batch_processor = kind(**options)

        mistake(f"processor: {text}", lambda: fit(Processing("line")))
        return kind

    return add


def channel(text: str, name: str = "on_batch") -> Callable[[type], type]:
    """Add the mistake that a hook context has."""

    def add(kind: type) -> type:
        def run() -> None:
            hooks = PipelineHooks()
            hooks.register(name, kind())
            fit(None, hooks)

        mistake(f"channel: {text}", run)
        return kind

    return add


# --- optimizer loops


@loop("the constructor does not call that of its base")
class TheConstructorDoesNotCallThatOfItsBase(OptimizerLoop):
    def __init__(self) -> None:
        self.count = 0


@loop("advance takes no batch")
class AdvanceTakesNoBatch(OptimizerLoop):
    def advance(self) -> None: ...


@loop("advance takes more than the batch")
class AdvanceTakesMoreThanTheBatch(OptimizerLoop):
    def advance(self, batch: Any, state: Any) -> None: ...


@loop("advance is misspelt")
class AdvanceIsMisspelt(OptimizerLoop):
    def advence(self, batch: Any) -> None: ...


@loop("advance is a generator")
class AdvanceIsAGenerator(OptimizerLoop):
    def advance(self, batch: Any) -> Any:
        yield self.forward(batch)


@loop("advance is async")
class AdvanceIsAsync(OptimizerLoop):
    async def advance(self, batch: Any) -> None: ...


@loop("advance does nothing")
class AdvanceDoesNothing(OptimizerLoop):
    def advance(self, batch: Any) -> None: ...


@loop("backward before forward")
class BackwardBeforeForward(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.session.model.net(batch[0]).mean())


@loop("forward alone")
class ForwardAlone(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.forward(batch)


@loop("no update")
class NoUpdate(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))


@loop("two updates")
class TwoUpdates(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))
        self.update()
        self.update()


@loop("update before backward")
class UpdateBeforeBackward(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.forward(batch)
        self.update()


@loop("backward of None")
class BackwardOfNone(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.forward(batch)
        self.backward(None)


@loop("backward of a float")
class BackwardOfAFloat(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch).item())


@loop("backward of a detached loss")
class BackwardOfADetachedLoss(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch).detach())
        self.update()


@loop("backward of a vector")
class BackwardOfAVector(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch) * torch.ones(2))
        self.update()


@loop("the loss's own backward")
class TheLosssOwnBackward(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.forward(batch).backward()
        self.update()


@loop("the optimizer's own step")
class TheOptimizersOwnStep(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))
        self.session.model.optimizer.step()


@loop("two optimizers, none named", Two)
class TwoOptimizersNoneNamed(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))


@loop("one of two optimizers has no update", Two)
class OneOfTwoOptimizersHasNoUpdate(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        losses, model = self.forward(batch), self.session.model
        self.backward(losses["a"], model.optimizer_a)
        self.backward(losses["b"], model.optimizer_b)
        self.update(model.optimizer_a)


@loop("an optimizer that is not the model's")
class AnOptimizerThatIsNotTheModels(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))
        self.update(torch.optim.SGD(self.session.model.net.parameters(), lr=0.1))


@loop("the name of an optimizer in its place")
class TheNameOfAnOptimizerInItsPlace(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))
        self.update("optimizer")


@loop("the parameters in place of the optimizer")
class TheParametersInPlaceOfTheOptimizer(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch), list(self.session.model.net.parameters()))


@loop("update is overridden without super")
class UpdateIsOverriddenWithoutSuper(OptimizerLoop):
    def update(self, optimizer: Any = None) -> bool:
        return True


@loop("update takes no optimizer")
class UpdateTakesNoOptimizer(OptimizerLoop):
    def update(self) -> bool:
        return super().update()


@loop("gradients are gone before the update")
class GradientsAreGoneBeforeTheUpdate(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.backward(self.forward(batch))
        self.session.model.optimizer.zero_grad()
        self.update()


@loop("StopIteration before the calls")
class StopIterationBeforeTheCalls(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        raise StopIteration


@loop("a helper with the name of an internal")
class AHelperWithTheNameOfAnInternal(OptimizerLoop):
    def _begin(self) -> None: ...


@loop("an attribute with the name of an internal")
class AnAttributeWithTheNameOfAnInternal(OptimizerLoop):
    def __init__(self) -> None:
        super().__init__()
        self._round = 0


@loop("a counter of the run is assigned")
class ACounterOfTheRunIsAssigned(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        super().advance(batch)
        self.session.state.global_iteration = 7


@loop("something is assigned to the context")
class SomethingIsAssignedToTheContext(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.session.context.batch = None
        super().advance(batch)


@loop("the session has no such attribute")
class TheSessionHasNoSuchAttribute(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.session.modell.train()


@loop("fit inside of a loop")
class FitInsideOfALoop(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        self.session.model.trainer.fit(Line("other"), Data())


@loop("done is a method")
class DoneIsAMethod(OptimizerLoop):
    def advance(self, batch: Any) -> None:
        super().advance(batch)

    def done(self) -> bool:
        return True


@loop("skip is a method")
class SkipIsAMethod(OptimizerLoop):
    def skip(self) -> bool:
        return False


@loop("run is overridden")
class RunIsOverridden(OptimizerLoop):
    def run(self, batch: Any) -> None: ...


@loop("on_run_start takes no batch")
class OnRunStartTakesNoBatch(OptimizerLoop):
    def on_run_start(self) -> None: ...


@loop("state_dict without load_state_dict")
class StateDictWithoutLoadStateDict(OptimizerLoop):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


@loop("the signature of backward")
class TheSignatureOfBackward(OptimizerLoop):
    def backward(self, loss: Any) -> None:
        super().backward(loss)


# --- batch and epoch loops


@loop("a batch loop forgets its child", accumulation_steps=2)
class ABatchLoopForgetsItsChild(BatchLoop):
    def advance(self, batch: Any) -> None:
        self.is_over = True

    @property
    def done(self) -> bool:
        return self.is_over

    def on_run_start(self, batch: Any) -> None:
        self.is_over = False


@loop("a batch loop has no done")
class ABatchLoopHasNoDone(BatchLoop):
    def advance(self, batch: Any) -> None:
        self.optimizer_loop.run(self.prepare(batch))


class Mapping(Own):
    def process_training_batch(self, batch: Any, state: Any) -> Any:
        return batch


class ABatchLoopForgetsPrepare(BatchLoop):
    @property
    def done(self) -> bool:
        return self.is_over

    def on_run_start(self, batch: Any) -> None:
        self.is_over = False

    def advance(self, batch: Any) -> None:
        self.is_over = True
        self.optimizer_loop.run(batch)


mistake(
    "loop: a batch loop forgets prepare",
    lambda: fit(None, Mapping(), batch_loop=ABatchLoopForgetsPrepare()),
)


@loop("an epoch loop forgets super().advance")
class AnEpochLoopForgetsSuperadvance(EpochLoop):
    def advance(self) -> None: ...


@loop("a batch loop calls super().advance without the batch")
class ABatchLoopCallsSuperadvanceWithoutTheBatch(BatchLoop):
    def advance(self, batch: Any) -> None:
        super().advance()


def _connect(**loops: Any) -> Callable[[], None]:
    return lambda: Trainer(use_cpu=True).fit_loop.epoch_loop.connect(**loops)


mistake("loop: a role is misspelt", _connect(bach_loop=BatchLoop()))
mistake("loop: a class is connected", _connect(batch_loop=BatchLoop))
mistake("loop: a role of another loop", _connect(batch_loop=OptimizerLoop()))
mistake(
    "loop: connected at another depth", lambda: Trainer(use_cpu=True).fit_loop.connect(batch_loop=1)
)
mistake(
    "loop: the wrong root",
    lambda: setattr(Trainer(use_cpu=True), "fit_loop", EpochLoop()),
)
mistake("loop: no root", lambda: setattr(Trainer(use_cpu=True), "fit_loop", None))
mistake("loop: run outside of a trainer", lambda: OptimizerLoop().run([1.0]))


# --- yields


def yielding(text: str, step: Callable[..., Any], **options: Any) -> None:
    """Add the mistake that a step that yields has."""
    kind = type("Yielding", (Pair,), {"train_step": step})
    mistake(f"yields: {text}", lambda: fit(kind("pair"), **options))


def _step(*shown: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(self: Any, batch: Any, state: Any) -> Any:
        for each in shown:
            yield each(self, *self.losses(batch))

    return train_step


def _a(self: Any, a: Any, b: Any) -> Any:
    return a


def _b(self: Any, a: Any, b: Any) -> Any:
    return b


yielding("one too few", _step(_a))
yielding("one too many", _step(_a, _b, _b))
yielding("None", _step(_a, lambda self, a, b: None))
yielding("a float", _step(_a, lambda self, a, b: b.item()))
yielding("a detached loss", _step(_a, lambda self, a, b: b.detach()))
yielding("a vector", _step(_a, lambda self, a, b: b * torch.ones(2)))
yielding("both losses in a tuple", _step(lambda self, a, b: (a, b)))
yielding("in the wrong order", _step(_b, _a))
yielding("the loop in place of SKIP", _step(_a, lambda self, a, b: YieldLoop))
mistake("yields: the optimizers of a loop are a string", lambda: YieldLoop("optimizer_a"))
mistake("yields: an optimizer is named twice", lambda: YieldLoop(["a", "a"]))
mistake(
    "yields: an optimizer is missing in the order",
    lambda: fit(Pair("pair"), loop=YieldLoop(["optimizer_a"])),
)
mistake("yields: a plain step with a YieldLoop", lambda: fit(loop=YieldLoop()))


@model("a generator without an optimizer")
class AGeneratorWithoutAnOptimizer(Pair):
    def setup(self, fast_init: bool = False) -> None:
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)


@model("a loss is returned after the yields")
class ALossIsReturnedAfterTheYields(Pair):
    def train_step(self, batch: Any, state: Any) -> Any:
        a, b = self.losses(batch)
        yield a
        return b


@model("next() on an empty iterator in a step that yields")
class NextOnAnEmptyIteratorInAStepThatYields(Pair):
    def train_step(self, batch: Any, state: Any) -> Any:
        next(iter([]))
        yield from self.losses(batch)


@model("a graph that an earlier yield has freed")
class AGraphThatAnEarlierYieldHasFreed(Pair):
    def train_step(self, batch: Any, state: Any) -> Any:
        outputs = self.second(self.first(batch[0]))
        yield outputs.square().mean()
        yield outputs.abs().mean()


@model("skip_step after the update it is meant for")
class SkipStepAfterTheUpdateItIsMeantFor(Pair):
    def train_step(self, batch: Any, state: Any) -> Any:
        a, b = self.losses(batch)
        yield a
        self.context.skip_step("too late")
        yield b


@model("backward is overridden, and the step yields")
class BackwardIsOverriddenAndTheStepYields(Pair):
    def backward(self, losses: Any) -> None: ...


@model("two optimizers share parameters that yield, with accumulation", accumulation_steps=2)
class TwoOptimizersShareParametersThatYieldWithAccumulation(Pair):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.optimizer_b.add_param_group({"params": list(self.first.parameters())})


@loop("a YieldLoop that calls forward", Pair)
class AYieldLoopThatCallsForward(YieldLoop):
    def advance(self, batch: Any) -> None:
        self.forward(batch)


# --- models


@model("no return")
class NoReturn(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        mse_loss(self.net(batch[0]), batch[1])


@model("two losses, and no way to add them")
class TwoLossesAndNoWayToAddThem(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        loss = super().train_step(batch, state)
        return {"a": loss, "b": loss}


@model("a loss that is a float")
class ALossThatIsAFloat(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        return super().train_step(batch, state).item()


@model("two optimizers, and one loss")
class TwoOptimizersAndOneLoss(Pair):
    def train_step(self, batch: Any, state: Any) -> Any:
        return sum(self.losses(batch))


@model("backward leaves no gradients")
class BackwardLeavesNoGradients(Line):
    def backward(self, losses: Any) -> None: ...


@model("backward takes no losses")
class BackwardTakesNoLosses(Line):
    def backward(self) -> None: ...


@model("backward makes the update, too")
class BackwardMakesTheUpdateToo(Line):
    def backward(self, losses: Any) -> None:
        losses["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@model("backward is overridden, and the step returns None")
class BackwardIsOverriddenAndTheStepReturnsNone(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        self.optimizer.zero_grad()
        super().train_step(batch, state).backward()
        self.optimizer.step()

    def backward(self, losses: Any) -> None:
        losses["loss"].backward()


@model("backward is misspelt")
class BackwardIsMisspelt(Line):
    def backwards(self, losses: Any) -> None:
        losses["loss"].backward()


@model("the step calls backward, and returns the loss")
class TheStepCallsBackwardAndReturnsTheLoss(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        loss = super().train_step(batch, state)
        self.engine.backward_loss(loss)
        return loss


@model("the step makes the update, and returns the loss")
class TheStepMakesTheUpdateAndReturnsTheLoss(Line):
    def train_step(self, batch: Any, state: Any) -> Any:
        loss = super().train_step(batch, state)
        loss.backward(retain_graph=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@model("a hook is misspelt")
class AHookIsMisspelt(Line):
    def on_training_epoch_strat(self, current_epoch: int) -> None: ...


@model("LBFGS, and the loss is returned")
class LBFGSAndTheLossIsReturned(Line):
    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.LBFGS(self.net.parameters())


# --- engines


@engine("the constructor does not call that of its base")
class TheConstructorDoesNotCallThatOfItsBaseEngine(Engine):
    def __init__(self, device: str) -> None:
        self.count = 0


@engine("optimizer_step returns nothing")
class OptimizerStepReturnsNothing(Engine):
    def optimizer_step(self, optimizer: Any) -> Any:
        super().optimizer_step(optimizer)


@engine("optimizer_step makes no step")
class OptimizerStepMakesNoStep(Engine):
    def optimizer_step(self, optimizer: Any) -> bool:
        return True


@engine("optimizer_step is misspelt")
class OptimizerStepIsMisspelt(Engine):
    def optimiser_step(self, optimizer: Any) -> bool:
        return True


@engine("backward_loss takes no inputs")
class BackwardLossTakesNoInputs(Engine):
    def backward_loss(self, loss: Any) -> None:
        loss.backward()


@engine("backward_loss does nothing")
class BackwardLossDoesNothing(Engine):
    def backward_loss(self, loss: Any, inputs: Any = None, **options: Any) -> None: ...


@engine("zero_grad takes no optimizer")
class ZeroGradTakesNoOptimizer(Engine):
    def zero_grad(self) -> None: ...


@engine("zero_grad does nothing")
class ZeroGradDoesNothing(Engine):
    def zero_grad(self, optimizer: Any) -> None: ...


@engine("autocast returns nothing")
class AutocastReturnsNothing(Engine):
    def autocast(self) -> Any: ...


@engine("an event with other parameters")
class AnEventWithOtherParameters(Engine):
    def on_training_batch_end(self) -> None: ...


@engine("an event is misspelt")
class AnEventIsMisspelt(Engine):
    def on_training_batch_ended(self, state: Any, should_log: bool) -> None: ...


@engine("a helper with the name of an internal")
class AHelperWithTheNameOfAnInternalEngine(Engine):
    def _find_scaler(self) -> None: ...


@engine("state_dict without super")
class StateDictWithoutSuper(Engine):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


@engine("state_dict without load_state_dict")
class StateDictWithoutLoadStateDictEngine(Engine):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


mistake("engine: a class", lambda: fit(engine=Engine))
mistake("engine: a name", lambda: fit(engine="cuda"))
mistake("engine: clipping beside it", lambda: fit(engine=Engine("cpu"), clip_norm=1.0))
mistake("engine: an unknown device", lambda: Engine("gpu"))
mistake("engine: the name of a precision", lambda: Engine("cpu", precision="bf16"))  # type: ignore[arg-type]
mistake("engine: a mode of sync_tensor", lambda: Engine("cpu").sync_tensor(torch.ones(1), "max"))
mistake(
    "engine: init_components gets a module",
    lambda: Engine("cpu").init_components(nn.Linear(1, 1)),
)


# --- plugins


@plugin("the constructor does not call that of its base")
class TheConstructorDoesNotCallThatOfItsBasePlugin(Plugin):
    def __init__(self) -> None:
        self.count = 0

    def setup(self) -> None: ...


@plugin("an event is misspelt")
class AnEventIsMisspeltPlugin(Own):
    def on_training_batch_strat(self, state: Any) -> None: ...


@plugin("an event with other parameters")
class AnEventWithOtherParametersPlugin(Own):
    def on_training_batch_end(self, state: Any) -> None: ...


@plugin("an event is async")
class AnEventIsAsync(Own):
    async def on_training_start(self) -> None: ...


@plugin("the context in setup")
class TheContextInSetup(Own):
    def setup(self) -> None:
        print(self.context.model)


@plugin("a batch is mapped to None")
class ABatchIsMappedToNone(Own):
    def process_training_batch(self, batch: Any, state: Any) -> Any: ...


@plugin("fit inside of a hook")
class FitInsideOfAHook(Own):
    def on_training_start(self) -> None:
        self.trainer.fit(Line("other"), Data())


@plugin("registers another inside of a hook")
class RegistersAnotherInsideOfAHook(Own):
    def on_training_start(self) -> None:
        self.trainer.register_plugin(Own("other"))


@plugin("skip_step outside of a window")
class SkipStepOutsideOfAWindow(Own):
    def on_training_epoch_start(self, current_epoch: int) -> None:
        self.context.skip_step("too early")


@plugin("skip_step after the update")
class SkipStepAfterTheUpdate(Own):
    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.context.skip_step("too late")


@plugin("log of a name and a number", enable_tensorboard=False)
class LogOfANameAndANumber(Own):
    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.context.log("loss", 3)


@plugin("log of a text")
class LogOfAText(Own):
    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.context.log({"loss": "high"})

    def on_log(self, scalars: Any, state: Any) -> None: ...


@plugin("log in on_log")
class LogInOnLog(Own):
    def on_training_start(self) -> None:
        self.context.log({"loss": 3})

    def on_log(self, scalars: Any, state: Any) -> None:
        self.context.log(scalars)


@plugin("the batch is assigned")
class TheBatchIsAssigned(Own):
    def on_training_batch_start(self, state: Any) -> None:
        self.context.batch = None


@plugin("the loss is assigned")
class TheLossIsAssigned(Own):
    def on_backward_start(self, loss: Any) -> None:
        self.context.loss = 2 * loss


@plugin("an attribute of the context is misspelt")
class AnAttributeOfTheContextIsMisspelt(Own):
    def on_backward_end(self) -> None:
        print(self.context.lss)


@plugin("a misspelt attribute of the context is assigned")
class AMisspeltAttributeOfTheContextIsAssigned(Own):
    def on_backward_end(self) -> None:
        self.context.lss = 3


@plugin("a counter is assigned")
class ACounterIsAssigned(Own):
    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        state.current_iteration = 0


@plugin("an optimizer is replaced in the table")
class AnOptimizerIsReplacedInTheTable(Own):
    def on_training_start(self) -> None:
        self.context.optimizers["optimizer"] = None


@plugin("StopIteration at the end of a batch")
class StopIterationAtTheEndOfABatch(Own):
    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        raise StopIteration


@plugin("StopIteration at each first batch")
class StopIterationAtEachFirstBatch(Own):
    def on_training_batch_start(self, state: Any) -> None:
        raise StopIteration


@plugin("request_stop without a reason")
class RequestStopWithoutAReason(Own):
    def on_training_start(self) -> None:
        self.context.request_stop()


@plugin("no setup")
class NoSetup(Plugin):
    def __init__(self) -> None:
        super().__init__("own")


@plugin("the model as an attribute")
class TheModelAsAnAttribute(Own):
    def on_training_start(self) -> None:
        print(self.model)


@plugin("an option is misspelt")
class AnOptionIsMisspelt(Own):
    monitr = True


@plugin("should_training_stop takes the state")
class ShouldTrainingStopTakesTheState(Own):
    def should_training_stop(self, state: Any) -> bool:
        return False


mistake("plugin: a class", lambda: fit(None, Own))
mistake("plugin: the same id twice", lambda: fit(None, Own(), Own()))
mistake("plugin: an id that is no text", lambda: fit(None, Own(3)))  # type: ignore[arg-type]
mistake("plugin: a function", lambda: fit(None, print))


def _two_maps() -> None:
    fit(None, Mapping("a"), Mapping("b"))


mistake("plugin: two that map a batch", _two_maps)


# --- channels


@channel("an unknown one", "on_epochs")
class AnUnknownOne(HookContext):
    def on_enter(self, ctx: Any) -> None: ...


@channel("a context that does nothing")
class AContextThatDoesNothing(HookContext): ...


@channel("on_enter takes no context")
class OnEnterTakesNoContext(HookContext):
    def on_enter(self) -> None: ...


@channel("on_exit is misspelt")
class OnExitIsMisspelt(HookContext):
    def on_enter(self, ctx: Any) -> None: ...

    def on_exti(self, ctx: Any) -> None: ...


@channel("on_enter is a generator")
class OnEnterIsAGenerator(HookContext):
    def on_enter(self, ctx: Any) -> Any:
        yield


@channel("state_dict without load_state_dict")
class StateDictWithoutLoadStateDictContext(HookContext):
    def on_enter(self, ctx: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


@channel("skip_step around an epoch", "on_epoch")
class SkipStepAroundAnEpoch(HookContext):
    def on_enter(self, ctx: Any) -> None:
        ctx.skip_step("too early")


@channel("something is assigned to the context")
class SomethingIsAssignedToTheContextContext(HookContext):
    def on_enter(self, ctx: Any) -> None:
        ctx.window = 3


@channel("StopIteration when a batch ends")
class StopIterationWhenABatchEnds(HookContext):
    def on_exit(self, ctx: Any) -> None:
        raise StopIteration


mistake("channel: a function", lambda: PipelineHooks().register("on_batch", print))  # type: ignore[arg-type]
mistake("channel: a class", lambda: PipelineHooks().register("on_batch", HookContext))  # type: ignore[arg-type]
mistake("channel: nothing to call", HookContext.from_callable)
mistake(
    "channel: a function of nothing",
    lambda: HookContext.from_callable(before=lambda: None),  # type: ignore[arg-type,misc]
)


# --- processors


@processor("the constructor does not call that of its base")
class TheConstructorDoesNotCallThatOfItsBaseProcessor(BatchProcessor):
    def __init__(self) -> None: ...

    def forward(self, model: Any, batch: Any) -> Any: ...


@processor("only the loss is returned")
class OnlyTheLossIsReturned(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        return model.net(batch[0]).mean()


@processor("outputs and loss are exchanged")
class OutputsAndLossAreExchanged(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        outputs = model.net(batch[0])
        return outputs.mean(), outputs


@processor("no loss")
class NoLoss(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        return model.net(batch[0]), None


@processor("a detached loss")
class ADetachedLoss(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        outputs = model.net(batch[0])
        return outputs, outputs.mean().detach()


@processor("a transform returns nothing", transforms=lambda batch: None)
class Fitting(BatchProcessor):
    def forward(self, model: Any, batch: Any) -> Any:
        outputs = model.net(batch[0])
        return outputs, outputs.mean()


@processor("forward takes the batch only")
class ForwardTakesTheBatchOnly(BatchProcessor):
    def forward(self, batch: Any) -> Any: ...


mistake("processor: a transform that cannot be called", lambda: Fitting(transforms=[3]))  # type: ignore[list-item]
mistake("processor: a transform in the place of need_backward", lambda: Fitting(print))  # type: ignore[arg-type]
mistake("processor: no function", lambda: BatchProcessor.from_callable(3))  # type: ignore[arg-type]


@model("a class in place of a processor")
class AClassInPlaceOfAProcessor(Line):
    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.batch_processor = Fitting  # type: ignore[assignment]


@model("a processor beside a step")
class AProcessorBesideAStep(Line):
    batch_processor = Fitting()


def first_line(name: str) -> str:
    """Return what a user sees first of a mistake: a warning, or an error."""
    with collect_warnings() as texts:
        try:
            MISTAKES[name]()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        else:
            found = "nothing"
    warned = [text for text in texts if not text.startswith("Training ended with an error")]
    if warned:
        found = f"WARNING: {warned[0]}"
    return re.sub(r" at 0x[0-9a-f]+", "", found.partition("\n")[0])


def page() -> str:
    """Return each mistake with the first line that its user sees."""
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        return "".join(f"{name}\n    {first_line(name)}\n" for name in MISTAKES)
    finally:
        logging.disable(disabled)
