"""Programs that random search once found to be silently wrong, as small as it made them."""

from __future__ import annotations

from tests.generated.program import Condition, Event, Layer, Line, Optimizer, Program, Value

FOUND: dict[str, tuple[str, Program]] = {
    "accumulation by a counter": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="adam"),),
            steps=((Line(kind="backward", form="square"), Line(kind="step", condition=Condition(value=0))),),
            order=(0,) * 10,
            values=(Value(holder="space", schedule="counts"),),
            seed=1267,
        ),
    ),
    "a counter with an effect at every eleventh call": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=(
                (
                    Line(kind="times", condition=Condition(value=0, period=11, phase=6)),
                    Line(kind="backward", form="square"),
                ),
            ),
            order=(0,) * 26,
            values=(Value(holder="space", schedule="counts"),),
            seed=3280,
        ),
    ),
    "one step given two models": (
        "capture",
        Program(
            form="given",
            models=((Layer(kind="Dense"),), (Layer(kind="Dense"),)),
            optimizers=(Optimizer(kind="sgd"), Optimizer(kind="sgd", model=1)),
            steps=((Line(kind="backward", form="square"),),),
            order=(1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1),
            events=(Event(kind="zero", when=("every", 2, 0), which=1),),
            seed=88,
        ),
    ),
    "a step for each of two models": (
        "capture",
        Program(
            form="each",
            models=((Layer(kind="Dense"),), (Layer(kind="Dense"),)),
            optimizers=(Optimizer(kind="sgd"), Optimizer(kind="sgd", model=1)),
            steps=((Line(kind="backward", form="square"),),),
            order=(1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0),
            events=(Event(kind="zero", when=("every", 3, 0), which=1),),
            shared=True,
            seed=189,
        ),
    ),
    "a value without effect and loaded optimizer state": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="momentum"),),
            steps=(
                (
                    Line(kind="times", condition=Condition(value=0, period=1000, phase=999)),
                    Line(kind="backward", form="square"),
                    Line(kind="step"),
                ),
            ),
            order=(0,) * 16,
            values=(Value(holder="space", schedule="counts"),),
            events=(Event(kind="load optimizer", when=("at", 7, 0)),),
            seed=5282,
        ),
    ),
    "optimizer step under a flag": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="adam"),),
            steps=((Line(kind="backward", form="square"), Line(kind="step", condition=Condition(value=0))),),
            order=(0,) * 28,
            values=(Value(holder="space", schedule="until", at=(19,)),),
            seed=38,
        ),
    ),
    "zero_grad under a counter": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=(
                (
                    Line(kind="backward", form="square"),
                    Line(kind="zero", condition=Condition(value=0, period=3, phase=1)),
                ),
            ),
            order=(0,) * 10,
            values=(Value(holder="space", schedule="counts"),),
            options=(("warmup", 2),),
            seed=2280,
        ),
    ),
    "order of decay and optimizer": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="adam"),),
            steps=(
                (
                    Line(kind="backward", form="square"),
                    Line(kind="decay", condition=Condition(value=0)),
                    Line(kind="step"),
                    Line(kind="decay", condition=Condition(value=0, period=3, negated=True)),
                ),
            ),
            order=(0,) * 50,
            values=(Value(holder="space", schedule="period", at=(50, 41)),),
            seed=31,
        ),
    ),
    "another optimizer under a scaler": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"), Line(kind="scaled step")),),
            order=(0,) * 8,
            events=(Event(kind="optimizer", when=("at", 3, 0), number=1),),
            scaler="enabled",
            options=(("warmup", 2),),
            seed=42,
        ),
    ),
    "optimizer state cleared in the step": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="adam"),),
            steps=((Line(kind="clear"), Line(kind="backward", form="square"), Line(kind="step")),),
            order=(0,) * 6,
            options=(("warmup", 1),),
            seed=17,
        ),
    ),
    "gradients exchanged": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 25,
            events=(Event(kind="swap grads", when=("at", 16, 0)),),
            seed=1067,
        ),
    ),
    "gradients shared, capture": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 19,
            events=(Event(kind="alias grads", when=("at", 10, 0), number=1),),
            seed=1247,
        ),
    ),
    "gradients shared, modules": (
        "modules",
        Program(
            form="one",
            models=((Layer(kind="Recurrent"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 17,
            events=(Event(kind="alias grads", when=("at", 8, 0), number=1),),
            seed=676,
        ),
    ),
    "gradients shared, stage": (
        "stage",
        Program(
            form="pipeline",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 20,
            events=(Event(kind="alias grads", when=("at", 11, 0)),),
            pipeline="Schedule1F1B",
            seed=8,
        ),
    ),
    "state after a refusal": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="zero"), Line(kind="backward", form="square"), Line(kind="lr"), Line(kind="step")),),
            order=(0,) * 8,
            seed=1332,
        ),
    ),
    "plain result of a part": (
        "modules",
        Program(
            form="one",
            models=((Layer(kind="Tells", value=0),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 27,
            values=(Value(holder="space", schedule="from", at=(18,)),),
            seed=7,
        ),
    ),
    "plain result of a part of a step that fell back": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Tells", value=0),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 25,
            values=(Value(holder="space", schedule="until", at=(16,)),),
            events=(Event(kind="module hook", when=("at", 1, 0), number=1),),
            options=(("on_error", "modules"),),
            seed=1596,
        ),
    ),
    "plain result of a callable": (
        "callables",
        Program(
            form="one",
            models=((Layer(kind="Tells", value=0),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 10,
            values=(Value(holder="space", schedule="grows", at=(4,)),),
            seed=203,
        ),
    ),
    "keys of a result by a counter": (
        "capture",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="step"),),),
            order=(0,) * 25,
            result="keys",
            result_condition=Condition(value=0, period=5, phase=1, negated=True),
            values=(Value(holder="space", schedule="counts"),),
            options=(("warmup", 2),),
            seed=40039,
        ),
    ),
    "backward with inputs under a flag": (
        "modules",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=(
                (
                    Line(kind="backward", form="square"),
                    Line(kind="backward", condition=Condition(value=0), form="inputs"),
                ),
            ),
            order=(0,) * 16,
            values=(Value(holder="space", schedule="flips", at=(7,)),),
            seed=30532,
        ),
    ),
    "hook and mode at once": (
        "modules",
        Program(
            form="one",
            models=((Layer(kind="Dense"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"),),),
            order=(0,) * 16,
            events=(Event(kind="accumulate hook", when=("at", 5, 0)), Event(kind="mode", when=("at", 5, 0), number=1)),
            options=(("warmup", 2),),
            seed=191,
        ),
    ),
    "parameter data of other strides": (
        "modules",
        Program(
            form="one",
            models=((Layer(kind="Weighted"),),),
            optimizers=(Optimizer(kind="adamw fused"),),
            steps=((Line(kind="backward", form="square"), Line(kind="step")),),
            order=(0,) * 19,
            events=(Event(kind="data transposed", when=("at", 9, 0), number=7),),
            seed=68,
        ),
    ),
    "mode changed after a step, stage": (
        "stage",
        Program(
            form="pipeline",
            models=((Layer(kind="Drop"), Layer(kind="Dense")),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="backward", form="square"), Line(kind="eval", condition=Condition(value=0))),),
            order=(0,) * 12,
            values=(Value(holder="space", schedule="grows", at=(4,)),),
            pipeline="ScheduleInterleavedZeroBubble",
            seed=1158,
        ),
    ),
    "mode toggled by the step, stage": (
        "stage",
        Program(
            form="pipeline",
            models=((Layer(kind="Drop"),),),
            optimizers=(Optimizer(kind="sgd"),),
            steps=((Line(kind="mode"), Line(kind="backward", form="square")),),
            order=(0,) * 8,
            seed=74,
        ),
    ),
}
"""The engine and the program of each."""
