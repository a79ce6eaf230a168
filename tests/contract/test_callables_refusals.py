"""What `make_graphed_callables` refuses, by name, and that a refused capture leaves nothing behind."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import stepgraph
from tests.callables_harness import WIDTH, Rank
from tests.module_harness import Layer


def x_on(device: torch.device, *shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*(shape or (4, WIDTH)), device=device, **options)


def refusal(call: Callable[[], Any], rule: str) -> stepgraph.StepgraphError:
    with pytest.raises(stepgraph.StepgraphError) as caught:
        call()
    assert caught.value.rule == rule, str(caught.value)
    return caught.value


def make(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: stepgraph.make_graphed_callables(*args, **kwargs)


# -- arguments


def test_container_that_a_callable_changes_is_refused_by_name(device: torch.device) -> None:
    class Cached(nn.Linear):
        def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            cache["x"] = x
            return super().forward(x)

    found = refusal(make(Cached(WIDTH, WIDTH).to(device), (x_on(device), {})), "argument-changed")
    assert "the module changes a container that it was given: `cache['x']` was added" in found.what


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp8_enabled", True), ("fp8_recipe", object()), ("fp8_group", object()), ("fp8_weight_caching", True)],
)
def test_fp8_is_refused_by_name(name: str, value: Any, device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    assert name in refusal(make(layer, (x_on(device),), **{name: value}), "fp8").what


def test_arguments_that_do_not_go_together_are_named(device: torch.device) -> None:
    layers = tuple(nn.Linear(WIDTH, WIDTH).to(device) for _ in range(2))
    x = (x_on(device),)
    rule = "sample-arguments"
    assert "sample_args: 1 for 2, one a callable" in refusal(make(layers, (x,)), rule).what
    assert "sample_args[1] is a Tensor" in refusal(make(layers, (x, x[0])), rule).what
    assert "sample_kwargs: 1 for 2" in refusal(make(layers, (x, x), sample_kwargs=({},)), rule).what
    assert "sample_kwargs[0] is an int" in refusal(make(layers, (x, x), sample_kwargs=(1, {})), rule).what
    assert "callables[1] is an int" in refusal(make((layers[0], 3), (x, x)), rule).what
    assert "no callables" in refusal(make((), ()), rule).what
    assert "callables[1] is the same module as callables[0]" in refusal(make((layers[0],) * 2, (x, x)), rule).what
    found = refusal(make(layers, (x,) * 4, order=[1, 1, 1, -1, -1, -1]), rule)
    assert "sample_args: 4 for 6, one a layer and microbatch (2 layers x 3 microbatches)" in found.what
    found = refusal(make(layers, (x,) * 4, order=[1, -1], num_layers_per_chunk=[3]), rule)
    assert "2 callables, and num_layers_per_chunk=[3] says 3" in found.what
    found = refusal(make(layers, (x,) * 3, order=[1, 2, 3, -3, -2, -1]), rule)
    assert "2 callables for an order of 3 chunks" in found.what
    found = refusal(make(layers, (x,) * 2, order=[1, -1], num_layers_per_chunk="2"), rule)
    assert "num_layers_per_chunk='2'" in found.what


def test_a_malformed_order_is_refused_at_its_entry(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    error = refusal(make(layer, ((x_on(device),),), order=[1, -1, -1]), "order")
    assert "entry 2 of the order is a backward of chunk 1 without a forward" in error.what


def test_options_are_refused_by_name(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    assert "num_warmup_iters=-1" in refusal(make(layer, (x_on(device),), num_warmup_iters=-1), "option").what
    assert "pool=(0, 1) is not a Session" in refusal(make(layer, (x_on(device),), pool=(0, 1)), "option").what
    both = {"order": [1, -1], "_order": [1, -1]}
    assert "both `order` and `_order`" in refusal(make(layer, ((x_on(device),),), **both), "option").what
    with pytest.raises(stepgraph.InvalidArgument, match="did you mean `_order`"):
        stepgraph.make_graphed_callables(layer, (x_on(device),), _odrer=[1, -1])


def test_capture_time_hooks_are_refused_by_name(device: torch.device) -> None:
    layer, rule = nn.Linear(WIDTH, WIDTH).to(device), "capture-time-hooks"

    def hooks(given: Any) -> str:
        return refusal(make(layer, (x_on(device),), capture_time_hooks=given), rule).what

    assert "capture_time_hooks" in hooks([None, None])
    assert "entry 0 is an int" in hooks([3])
    assert "entry 0 has 'forward_hook'" in hooks([{"forward_hook": {}}])
    assert "forward_hooks of entry 0 has an int" in hooks([{"forward_hooks": {0: 1}}])
    assert "a hook of callables[0] (forward_hooks) returned a value" in hooks([{"forward_hooks": {0: lambda m: 1}}])


def test_what_requires_a_gradient_and_gets_none_is_named(device: torch.device) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.left = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    net = Partly().to(device)
    x, y = x_on(device, requires_grad=True), x_on(device, requires_grad=True)
    assert "argument `y`" in refusal(make(net, (x, y)), "unused-input").what
    assert "parameter `left.weight`" in refusal(make(net, (x, y.detach())), "unused-input").what
    stepgraph.make_graphed_callables(net, (x, y), allow_unused_input=True)
    net(x, y).sum().backward()
    assert net.left.weight.grad is None
    assert y.grad is None
    assert x.grad is not None


def test_a_graphed_module_is_not_graphed_twice(device: torch.device) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    stepgraph.make_graphed_callables(layer, (x_on(device),))
    assert "has graphs already" in refusal(make(layer, (x_on(device),)), "sample-arguments").what


# -- calls


def test_calls_unlike_the_sample_are_refused_with_differences(device: torch.device) -> None:
    """Traps: a wrong shape is broadcast, a wrong dtype cast, an extra keyword argument ignored."""
    layer = Layer().to(device)
    mask = torch.ones(4, WIDTH, device=device)
    stepgraph.make_graphed_callables(layer, (x_on(device),), sample_kwargs={"mask": mask})
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: layer(x_on(device, 2, WIDTH), mask=mask), "x: shape changed (captured f32[4, 8]"),
        (lambda: layer(x_on(device).double(), mask=mask), "x: dtype changed"),
        (lambda: layer(x_on(device)), "mask: missing (captured present, received absent)"),
        (lambda: layer(x_on(device), mask=mask, extra=1), "extra: extra (captured absent, received present)"),
        (lambda: layer(x_on(device), mask=None), "mask: type changed"),
        (lambda: layer(x_on(device, requires_grad=True), mask=mask), "x: requires_grad changed"),
    ]
    for call, expected in calls:
        error = refusal(call, "sample-mismatch")
        assert expected in str(error)
        assert error.what.startswith("callables[0] (Layer): ")
    assert stepgraph.engine.parts.callables.report(layer).refused == {"sample-mismatch": len(calls)}
    assert f"sample-mismatch: {len(calls)}" in str(stepgraph.engine.parts.callables.report(layer))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        error = refusal(lambda: layer(x_on(device), mask=mask), "sample-mismatch")
    assert f"autocast on {device.type}: changed" in str(error)
    layer(x_on(device, WIDTH, 4).t(), mask=mask)  # other strides are brought to the sample's


def test_a_plain_value_is_baked_in(device: torch.device) -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    graphed = stepgraph.make_graphed_callables(scaled, (x_on(device, requires_grad=True), 2.0))
    x = x_on(device)
    assert torch.equal(graphed(x, 2.0), x * 2)
    assert "factor: value changed (captured 2.0, received 3.0)" in str(
        refusal(lambda: graphed(x, 3.0), "sample-mismatch")
    )


def test_a_named_random_state_must_be_the_captured_one(device: torch.device) -> None:
    tracker = stepgraph.get_cuda_rng_tracker(device)
    tracker.reset()
    tracker.add("dropout", 3)
    try:
        layer, twin = Layer(dropout=0.5).to(device), Layer(dropout=0.5).to(device)
        twin.load_state_dict(layer.state_dict())
        x, before = x_on(device), tracker.get_states()
        with tracker.fork("dropout"):
            stepgraph.make_graphed_callables(layer, (x,))
        assert all(torch.equal(before[name], state) for name, state in tracker.get_states().items())
        assert "named random state" in refusal(lambda: layer(x_on(device)), "sample-mismatch").what
        for _ in range(3):
            x, states = x_on(device), tracker.get_states()
            with tracker.fork("dropout"):
                received = layer(x)
                received.sum().backward()
            tracker.set_states(states)
            with tracker.fork("dropout"):
                expected = twin(x)
                expected.sum().backward()
            assert torch.equal(received, expected)
            assert torch.equal(layer.up.weight.grad, twin.up.weight.grad)  # type: ignore[arg-type]
        layer.reset()
    finally:
        tracker.reset()


def test_a_second_call_in_flight_is_refused(device: torch.device) -> None:
    """Trap: two forwards before their backwards."""
    layer = Layer().to(device)
    stepgraph.make_graphed_callables(layer, (x_on(device),))
    first = layer(x_on(device))
    assert "callables[0] (Layer)" in refusal(lambda: layer(x_on(device)), "call-in-flight").what
    first.sum().backward()
    layer(x_on(device))  # its results are dropped, so that no backward can come
    layer(x_on(device)).sum().backward()


def test_callables_out_of_their_order_are_refused(device: torch.device) -> None:
    first, second = Layer().to(device), Layer().to(device)
    stepgraph.make_graphed_callables((first, second), ((x_on(device),), (x_on(device),)))
    hidden = second(x_on(device))
    error = refusal(lambda: first(x_on(device)), "call-in-flight")
    assert "callables[0] (Layer) is called while callables[1] (Layer) waits for its backward" in error.what
    hidden.sum().backward()
    first(x_on(device)).sum().backward()


def test_changes_after_the_capture_are_named(device: torch.device) -> None:
    """Trap: a parameter replaced, `.data` swapped, a module moved: a stale address, silently. And host values."""
    changes: list[tuple[Callable[[nn.Linear], Any], str]] = [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.randn_like(m.weight))), "weight` was replaced"),
        (lambda m: setattr(m.weight, "data", m.weight.data.clone()), "weight` moved to another address"),
        (lambda m: m.weight.requires_grad_(False), "requires_grad of `callables[0] (Linear).weight` is False"),
        (lambda m: m.weight.register_hook(lambda grad: grad), "a hook was added to `callables[0] (Linear).weight`"),
    ]
    for change, expected in changes:
        layer = nn.Linear(WIDTH, WIDTH).to(device)
        stepgraph.make_graphed_callables(layer, (x_on(device),))
        layer(x_on(device)).sum().backward()
        change(layer)
        assert expected in refusal(lambda layer=layer: layer(x_on(device)), "state-changed").what  # type: ignore[misc]
        layer.reset()
        layer(x_on(device))


def test_module_made_in_the_warm_up_is_refused(device: torch.device) -> None:
    class Lazy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "part"):
                self.part = nn.Linear(WIDTH, WIDTH, device=x.device)
            return self.part(x)

    lazy = Lazy()
    error = refusal(make(lazy, (x_on(device),)), "own-change")
    assert ".part` was added while it warmed up" in error.what
    graphed = stepgraph.make_graphed_callables(lazy, (x_on(device),))
    x = x_on(device)
    assert torch.equal(graphed(x), lazy.part(x))


def test_hooks_inside_are_refused(device: torch.device) -> None:
    """Trap: hooks of submodules, accepted and never run."""
    layer = Layer().to(device)
    handle = layer.up.register_forward_hook(lambda *_: None)
    assert "callables[0] (Layer).up" in refusal(make(layer, (x_on(device),)), "module-hook").what
    handle.remove()
    handle = layer.register_forward_hook(lambda *_: None)
    refusal(make(layer, ((x_on(device),),), order=[1, -1]), "module-hook")
    handle.remove()
    (graphed,) = stepgraph.make_graphed_callables(layer, ((x_on(device),),), order=[1, -1])
    everywhere = register_module_forward_hook(lambda *_: None)
    try:
        assert "would not run" in refusal(lambda: graphed(x_on(device)), "module-hook").what
    finally:
        everywhere.remove()
    graphed(x_on(device)).sum().backward()


def test_own_hook_of_a_compiled_module_is_refused(device: torch.device) -> None:
    """After compile() a module's own hooks run inside what is recorded: replays would not run them."""
    layer = Layer().to(device)
    layer.register_forward_hook(lambda *_: None)
    layer.compile(backend="eager")
    assert "has a hook" in refusal(make(layer, (x_on(device),)), "module-hook").what


def test_module_passed_as_an_argument_is_guarded(device: torch.device) -> None:
    layer, x = Layer().to(device), x_on(device)
    graphed = stepgraph.make_graphed_callables(lambda module, x: module(x), (layer, x))
    graphed(layer, x)
    layer.register_forward_hook(lambda *_: None)
    assert "a hook of `Layer` was added" in refusal(lambda: graphed(layer, x), "state-changed").what


def test_second_derivatives_and_partial_backwards_are_refused(device: torch.device) -> None:
    """Trap: a gradient penalty that silently vanishes."""
    first, second = Layer().to(device), Layer().to(device)
    for layer in (first, second):
        stepgraph.make_graphed_callables(layer, (x_on(device, requires_grad=True),))
    x = x_on(device, requires_grad=True)
    refusal(lambda: torch.autograd.grad(first(x).sum(), x, create_graph=True), "create-graph")
    refusal(lambda: torch.autograd.grad(second(x).sum(), x), "partial-backward")


# -- the order of replays


def test_a_replay_out_of_order_names_the_expected_entry(device: torch.device) -> None:
    rank = Rank(device, [1, 1, -1, -1], [2])
    graphed = rank.capture()
    x = x_on(device, requires_grad=True)
    error = refusal(lambda: graphed[1](x), "replay-order")
    assert error.details == (
        "order     1 1 -1 -1",
        "          ^",
        "expected  entry 0 of 4: forward of chunk 1, microbatch 0, layer 0 (sample 0: callables[0] (Layer))",
        "received  forward of chunk 1, microbatch 0, layer 1 (sample 1: callables[1] (Layer))",
    )
    first = graphed[1](graphed[0](x))
    with pytest.raises(stepgraph.CaptureError, match="entry 1 of 4: forward of chunk 1, microbatch 1, layer 0"):
        first.sum().backward()
    second = graphed[3](graphed[2](x))
    with pytest.raises(stepgraph.CaptureError, match="entry 2 of 4: backward of chunk 1, microbatch 0, layer 1"):
        second.sum().backward()
    refusal(lambda: graphed[0](x), "replay-order")


def test_round_that_is_given_up_may_begin_again(device: torch.device) -> None:
    rank = Rank(device, [1, 1, -1, -1], [2])
    graphed = rank.capture()
    x = x_on(device, requires_grad=True)
    hidden = graphed[1](graphed[0](x))
    refusal(lambda: graphed[0](x), "replay-order")
    del hidden
    expected = rank.model[1]
    rank.model.eval()
    rank.model.train()
    rank.run(torch.randn(1, 2, 4, WIDTH, device=device))
    assert expected.up.weight.grad is not None  # type: ignore[union-attr]


def test_an_ordered_forward_without_gradients_is_refused(device: torch.device) -> None:
    rank = Rank(device, [1, -1], [1])
    graphed = rank.capture()
    with torch.no_grad():
        error = refusal(lambda: graphed[0](x_on(device)), "sample-mismatch")
    assert "grad mode: changed" in str(error)


def test_a_second_backward_needs_the_graph_retained(device: torch.device) -> None:
    for retain in (False, True):
        rank = Rank(device, [1, 1, -1, -1], [2])
        graphed = rank.capture(retain_graph_in_backward=retain)
        for _ in range(2):
            rank.model.zero_grad()
            losses = [graphed[i + 1](graphed[i](x_on(device))).sum() for i in (0, 2)]
            losses[0].backward(retain_graph=True)
            losses[1].backward(retain_graph=True)
            once = [p.grad.clone() for p in rank.model.parameters()]  # type: ignore[union-attr]
            if retain:
                losses[1].backward()
                losses[0].backward()
            else:
                refusal(losses[1].backward, "replay-order")
            factor = 2 if retain else 1
            for parameter, grad in zip(rank.model.parameters(), once, strict=True):
                torch.testing.assert_close(parameter.grad, factor * grad)  # the sums are made in another order
            del losses


def test_a_gradient_that_is_held_over_steps_is_refused(device: torch.device) -> None:
    rank = Rank(device, [1, -1], [1])
    rank.capture()
    batch = torch.randn(1, 1, 4, WIDTH, device=device)
    rank.run(batch)
    held = rank.model[0].up.weight.grad  # type: ignore[union-attr]
    kept = held.clone()  # type: ignore[union-attr, operator]
    rank.model.zero_grad()
    assert "callables[0] (Layer)" in refusal(lambda: rank.run(batch), "held-gradient").what
    assert torch.equal(held, kept)  # type: ignore[arg-type]


def test_a_backward_under_autocast_is_refused(device: torch.device) -> None:
    rank = Rank(device, [1, -1], [1])
    graphed = rank.capture()
    loss = graphed[0](x_on(device)).sum()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert "autocast on" in str(refusal(loss.backward, "sample-mismatch"))


def test_gradients_of_any_strides_get_the_captured_strides(device: torch.device) -> None:
    rank = Rank(device, [1, -1], [1], make=lambda: Layer(dropout=0.0))
    graphed = rank.capture()
    for form in (lambda y: y.sum(), lambda y: y.t().contiguous().pow(2).sum(), lambda y: y[:2].mean()):
        x = x_on(device)
        rank.model.zero_grad()
        form(graphed[0](x)).backward()
        received = [p.grad.clone() for p in rank.model.parameters()]  # type: ignore[union-attr]
        y = rank.model[0](x)
        dy = torch.autograd.grad(form(y), y, retain_graph=True)[0].contiguous()  # kernels may round by strides
        expected = torch.autograd.grad(y, list(rank.model.parameters()), dy)
        assert all(torch.equal(one, two) for one, two in zip(received, expected, strict=True))


# -- failed captures


def test_a_failed_capture_leaves_all_as_it_was(device: torch.device) -> None:
    """Trap: a failed capture leaves gc off, gradients None or a class patched."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * float(x.sum())

    layers = (Layer().to(device), Reading().to(device))
    layers[0].up.weight.grad = torch.ones_like(layers[0].up.weight)
    before = {name: value.clone() for layer in layers for name, value in layer.state_dict().items()}
    error = refusal(make(layers, ((x_on(device),), (x_on(device),))), "host-read")
    assert "callables[1] (Reading)" in error.what
    assert gc.isenabled()
    assert not stepgraph.is_graph_capturing()
    assert not stepgraph.is_graph_warmup()
    assert all("forward" not in vars(layer) for layer in layers)
    assert torch.equal(layers[0].up.weight.grad, torch.ones_like(layers[0].up.weight))
    assert all(torch.equal(before[n], v) for layer in layers for n, v in layer.state_dict().items())
    stepgraph.make_graphed_callables(layers[0], (x_on(device),))
    F.relu(layers[0](x_on(device))).sum().backward()


def test_what_no_replay_could_repeat_is_refused(device: torch.device) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    layer = Counting(WIDTH, WIDTH).to(device)
    error = refusal(make(layer, (x_on(device),)), "module-attribute")
    assert "callables[0] (Counting)" in error.what
    assert layer.calls == 0
    error = refusal(make(lambda x: (x * 2, time.perf_counter()), (x_on(device),)), "varying-output")
    assert "<lambda>): result[1] was " in error.what
