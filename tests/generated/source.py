"""Writes a program as Python."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.generated.program import OPTIMIZERS, SCHEDULES, Condition, Event, Layer, Line, Program, literal

RUNTIME = Path(__file__).with_name("runtime.py")
HEAD = "from tests.generated.runtime import *\n\n\n"
_START = {"flag": "False", "number": "1.0", "count": "0"}
_LOSSES = {
    "square": "y.square().mean()",
    "smooth": "F.smooth_l1_loss(y, torch.ones_like(y))",
    "log softmax": "y.log_softmax(-1)[:, 0].neg().mean()",
    "penalty": "y.square().mean() + 0.01 * sum(p.square().sum() for p in {net}.parameters())",
    "autograd.grad": "y.square().mean()",
    "inputs": "y.square().mean()",
    "retain": "y.square().mean()",
}
_NO_GRAD = "with torch.no_grad():"


class Source:
    """The text of one program."""

    def __init__(self, program: Program) -> None:
        self.p = program
        self.given = program.form in ("given", "each")

    # -- values

    def name(self, value: int) -> str:
        """How code reads and sets a value."""
        name, holder = f"v{value}", self.p.values[value].holder
        named = {
            "dict": f'cfg["{name}"]',
            "space": f"space.{name}",
            "deep": f"deep.inner.{name}",
            "net": f"net0.{name}",
        }
        return named.get(holder, name)

    def used(self) -> list[int]:
        """The values that the program reads."""
        lines = [line for step in self.p.steps for line in step]
        conditions = [line.condition for line in lines] + [self.p.result_condition]
        read = {c.value for c in conditions if c is not None} | {line.weight for line in lines}
        return sorted((read | {layer.value for net in self.p.models for layer in net}) - {None})  # type: ignore[type-var]

    def arguments(self) -> list[str]:
        return [f"v{i}" for i in self.used() if self.p.values[i].holder == "argument" and not self.is_layers(i)]

    def is_layers(self, value: int) -> bool:
        return any(layer.value == value for net in self.p.models for layer in net)

    def condition(self, condition: Condition) -> str:
        kind, name = self.p.values[condition.value].kind, self.name(condition.value)
        if kind == "flag":
            return f"not {name}" if condition.negated else name
        if kind == "number":
            return f"{name} {'<=' if condition.negated else '>'} 1.4"
        return f"{name} % {condition.period} {'!=' if condition.negated else '=='} {condition.phase}"

    def weight(self, value: int) -> str:
        kind, name = self.p.values[value].kind, self.name(value)
        return {"flag": f"(2.0 if {name} else 1.0)", "number": name, "count": f"(1.0 + {name} % 3)"}[kind]

    def set_values(self) -> list[str]:
        """What the loop does before each call."""
        found = []
        for i in self.used():
            value, name = self.p.values[i], self.name(i)
            first = value.at[0] if value.at else 0
            every = {
                "counts": "i",
                "ramps": "1.0 + 0.1 * i",
                "from": f"i >= {first}",
                "until": f"i < {first}",
                "period": f"i % {first} == {value.at[-1] if value.at else 0}",
            }
            if value.schedule in every:
                found.append(f"{name} = {every[value.schedule]}")
            elif value.schedule != "rests":
                calls = ", ".join(map(str, value.at))
                change = f"not {name}" if value.schedule == "flips" else f"{name} * 1.5"
                found += [f"if i in ({calls},):", f"    {name} = {change}"]
        return found

    # -- set-up

    def layer(self, layer: Layer) -> str:
        if layer.value is None:
            return f"{layer.kind}()"
        return f"{layer.kind}(lambda: {self.name(layer.value)})"

    def set_up(self) -> list[str]:
        p, used = self.p, self.used()
        starts = {i: _START[p.values[i].kind] for i in used}
        held = {h: [i for i in used if p.values[i].holder == h] for h in ("dict", "space", "deep", "net")}
        found = [f"seed({p.seed})"]
        if held["dict"]:
            found.append("cfg = {" + ", ".join(f'"v{i}": {starts[i]}' for i in held["dict"]) + "}")
        for holder in ("space", "deep"):
            if held[holder]:
                inner = f"types.SimpleNamespace({', '.join(f'v{i}={starts[i]}' for i in held[holder])})"
                found.append(f"{holder} = {inner if holder == 'space' else f'types.SimpleNamespace(inner={inner})'}")
        found += [f"v{i} = {starts[i]}" for i in used if p.values[i].holder in ("cell", "argument")]
        for i, layers in enumerate(p.models):
            found.append(f"net{i} = Net({', '.join(self.layer(layer) for layer in layers)})")
        found += [f"net0.v{i} = {starts[i]}" for i in held["net"]]
        for i, optimizer in enumerate(p.optimizers):
            found.append(f"opt{i} = {self.optimizer(i)}")
            if optimizer.schedule is not None:
                found.append(f"sched{i} = {SCHEDULES[optimizer.schedule].format(f'opt{i}')}")
        if p.scaler is not None:
            found.append(
                f"scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=7, "
                f"enabled={p.scaler == 'enabled'})"
            )
        for i in range(len(p.models)):
            if p.average == "swa":
                found.append(f"average{i} = torch.optim.swa_utils.AveragedModel(net{i})")
            elif p.average == "lerp":
                found.append(f"average{i} = [q.detach().clone() for q in net{i}.parameters()]")
        return found

    def optimizer(self, number: int, kind: str | None = None) -> str:
        optimizer = self.p.optimizers[number]
        net = f"net{optimizer.model}"
        parameters = f"{net}.parameters()"
        if optimizer.grouped:
            groups = [
                f'{{"params": [q for q in {net}.parameters() if q.dim() {sign} 1]{more}}}'
                for sign, more in ((">", ""), ("<=", ', "lr": 0.02, "weight_decay": 0.0'))
            ]
            parameters = f"[{', '.join(groups)}]"
        return OPTIMIZERS[kind or optimizer.kind].format(parameters)

    # -- steps

    def step(self, number: int) -> list[str]:
        """The function of a step."""
        given = ["net", "opt"] if self.p.form == "given" else []
        body = ["loss = y = torch.zeros((), device=DEVICE)"]
        for line in self.p.steps[number]:
            text = self.line(line)
            if line.condition is not None:
                body += [f"if {self.condition(line.condition)}:", *indented(text)]
            else:
                body += text
        body += self.result()
        return [f"def step{number}({', '.join([*given, 'x', *self.arguments()])}):", *indented(body)]

    def line(self, line: Line) -> list[str]:
        net, opt = ("net", "opt") if self.given else (f"net{line.which}", f"opt{line.which}")
        if line.kind == "backward":
            return self.backward(line, net, opt)
        average = [_NO_GRAD, f"    torch._foreach_lerp_(average{line.which}, list({net}.parameters()), 0.1)"]
        if self.p.average == "swa":
            average = [f"average{line.which}.update_parameters({net})"]
        return {
            "zero": [f"{opt}.zero_grad()"],
            "zero in place": [f"{opt}.zero_grad(set_to_none=False)"],
            "zero model": [f"{net}.zero_grad()"],
            "unscale": [f"scaler.unscale_({opt})"],
            "clip": [f"nn.utils.clip_grad_norm_({net}.parameters(), 0.1)"],
            "clip value": [f"nn.utils.clip_grad_value_({net}.parameters(), 0.01)"],
            "step": [f"{opt}.step()"],
            "scaled step": [f"scaler.step({opt})", "scaler.update()"],
            "closure": [
                "def closure():",
                f"    {opt}.zero_grad()",
                f"    loss = {net}(x).square().mean()",
                "    loss.backward()",
                "    return loss",
                f"loss = {opt}.step(closure)",
            ],
            "decay": [_NO_GRAD, f"    for q in {net}.parameters():", "        q.mul_(0.9)"],
            "noise": [
                _NO_GRAD,
                f"    {net}.head.bias.add_(torch.randn({net}.head.bias.shape, device=DEVICE), alpha=0.001)",
            ],
            "clear": [f"{opt}.state.clear()"],
            "train": [f"{net}.train()"],
            "eval": [f"{net}.eval()"],
            "mode": [f"{net}.train(not {net}.training)"],
            "grad none": [f"{net}.head.weight.grad = None"],
            "times": ["x = x * 2"],
            "lr": [f'{opt}.param_groups[0]["lr"] = 0.05'],
            "average": average,
        }[line.kind]

    def backward(self, line: Line, net: str, opt: str) -> list[str]:
        weight = "" if line.weight is None else f" * {self.weight(line.weight)}"
        if self.p.form == "pipeline":
            found = [
                "losses = []",
                "schedule.step(x, target=x, losses=losses)",
                f"loss = torch.stack(losses).mean(){weight}",
            ]
            return found
        loss = _LOSSES[line.form].format(net=net)
        if weight and " + " in loss:
            loss = f"({loss})"
        forward = [f"y = {net}(x)", f"loss = {loss}{weight}"]
        if self.p.autocast:
            forward = ["with torch.autocast(DEVICE.type, torch.bfloat16):", *indented(forward)]
        if self.p.form == "both" and line.which == 1 and line.form != "smooth":
            forward = [text.replace(f"{net}(x)", f"{net}(net0(x))") for text in forward]
        scaled = "scaler.scale(loss)" if self.p.scaler is not None else "loss"
        if line.form == "autograd.grad":
            return [
                *forward,
                f"leaves = [q for q in {net}.parameters() if q.requires_grad]",
                f"for q, g in zip(leaves, torch.autograd.grad({scaled}, leaves, allow_unused=True)):",
                "    if g is not None and q.grad is not None:",
                "        q.grad.add_(g)",
            ]
        given = {"inputs": f"inputs=[q for q in {net}.parameters() if q.requires_grad]", "retain": "retain_graph=True"}
        found = [*forward, f"{scaled}.backward({given.get(line.form, '')})"]
        return [*found, f"{scaled}.backward()"] if line.form == "retain" else found

    def result(self) -> list[str]:
        condition = self.p.result_condition
        c = "False" if condition is None else self.condition(condition)
        return {
            "loss": ["return loss.detach()"],
            "loss and output": ["return loss.detach(), y.detach()"],
            "either": [f"return y.detach() if {c} else loss.detach()"],
            "output": ["return y.detach() * 2"],
            "number": ['return {"loss": loss.detach(), "number": 3.0}'],
            "keys": ['found = {"loss": loss.detach()}', f"if {c}:", '    found["more"] = 0.5', "return found"],
            "none": [f"return loss.detach(), (y.detach() if {c} else None)"],
            "nothing": [],
        }[self.p.result]

    # -- events

    def event(self, event: Event) -> list[str]:
        net, opt, n = f"net{event.which}", f"opt{event.which}", event.number
        p = f"pick({net}, {n})"
        optimizer = list(OPTIMIZERS)[n % 10]
        sched = self.p.optimizers[event.which].schedule
        return {
            "load model": [f"{net}.load_state_dict(saved{event.which})"],
            "load optimizer": [f"{opt}.load_state_dict(saved_opt{event.which})"],
            "lr": [f"for group in {opt}.param_groups:", '    group["lr"] *= 0.5'],
            "momentum": [
                f"for group in {opt}.param_groups:",
                '    if "betas" in group:',
                '        group["betas"] = (0.8, 0.9)',
                '    group["weight_decay"] = 0.02',
            ],
            "mode": [f"{net}.train(not {net}.training)"],
            "clear state": [f"{opt}.state.clear()"],
            "state value": [
                f"for found in {opt}.state.values():",
                "    for name, value in found.items():",
                '        if torch.is_tensor(value) and name != "step":',
                "            found[name] = value * 0.5",
            ],
            "freeze": [f"{p}.requires_grad_(False)"],
            "unfreeze": [f"for q in {net}.parameters():", "    q.requires_grad_(True)"],
            "grad none": [f"for q in {net}.parameters():", "    q.grad = None"],
            "one grad none": [f"{p}.grad = None"],
            "own grads": [f"own_gradients({net})"],
            "own grads kept": [f"if {p}.requires_grad:", f"    {p}.grad = own = torch.full_like({p}, 0.1)"],
            "zero grads": [f"for q in {net}.parameters():", "    if q.grad is not None:", "        q.grad.zero_()"],
            "grad scaled": [f"if {p}.grad is not None:", f"    {p}.grad = {p}.grad * 0.5"],
            "swap grads": [f"swap_gradients({net}, {n})"],
            "alias grads": [f"alias_gradients({net}, {n})"],
            "data": [f"{p}.data = {p}.data.clone()"],
            "data transposed": [f"{p}.data = {p}.data.t().contiguous().t()" if n % 2 else f"{p}.data = {p}.data * 0.5"],
            "parameter": [f"replace_parameter({net}, {n})"],
            "buffer": [f"replace_buffer({net}, {n})"],
            "optimizer": [f"{opt} = {self.optimizer(event.which, optimizer if n % 2 else None)}"],
            "scale": ["scaler.update(2.0)"] if self.p.scaler == "enabled" else ["pass"],
            "module hook": [f"hooks.append(hooked({net}, {n}).register_forward_hook(halve_result))"],
            "tensor hook": [f"if {p}.requires_grad:", f"    hooks.append({p}.register_hook(halve))"],
            "accumulate hook": [
                f"if {p}.requires_grad:",
                f"    hooks.append({p}.register_post_accumulate_grad_hook(halve_gradient))",
            ],
            "optimizer hook": [f"hooks.append({opt}.register_step_pre_hook(halve_gradients))"],
            "unhook": ["while hooks:", "    hooks.pop().remove()"],
            "step": [f"{opt}.step()"],
            "zero": [f"{opt}.zero_grad()"],
            "zero in place": [f"{opt}.zero_grad(set_to_none=False)"],
            "evaluate": [_NO_GRAD, f"    {net}(batch(i))"],
            "backward outside": [f"{net}(batch(i)).sum().backward()"],
            "add group": ["pass"]
            if sched
            else [
                "extra = nn.Parameter(torch.ones(2, device=DEVICE))",
                f'{opt}.add_param_group({{"params": [extra]}})',
            ],
            "times": [_NO_GRAD, f"    {p}.mul_(0.5)"],
            "collect": ["import gc", "gc.collect()"],
            "drop layer": [f"{net}.layers[0].requires_grad_(False)"],
            "deep copy": [f"clone = copy.deepcopy({net})"],
            "reload": [f"{net}.load_state_dict({{k: v.clone() for k, v in {net}.state_dict().items()}}, assign=True)"],
            "new scheduler": [f"sched{event.which} = {SCHEDULES['step'].format(opt)}"] if sched else ["pass"],
        }[event.kind]

    def events(self) -> list[str]:
        found = []
        for event in self.p.events:
            how, first, second = event.when
            when = {"at": f"i == {first}", "every": f"i % {first} == {second}", "from": f"i >= {first}"}[how]
            if event.kind in ("load model", "load optimizer"):
                net = event.kind == "load model"
                one, saved = (f"net{event.which}", f"saved{event.which}")
                if not net:
                    one, saved = f"opt{event.which}", f"saved_opt{event.which}"
                save = max(0, first - 3) if how == "at" else 0
                found += [f"if i == {save}:", f"    {saved} = copy.deepcopy({one}.state_dict())"]
            found += [f"if {when}:", *indented(self.event(event))]
        return found

    # -- the whole

    def loop(self) -> list[str]:
        p = self.p
        rows = f"2 if i in {p.small!r} else 4" if p.small else "4"
        dtype = f", torch.float64 if i in {p.other_dtype!r} else torch.float32" if p.other_dtype else ""
        body = [*self.set_values(), *self.events(), f"x = batch(i, {rows}{dtype})", "trace.begin()"]
        arguments = ", ".join(["x", *self.arguments()])
        call = f"step0({arguments})"
        if p.form == "given":
            call = f"step0(*((net0, opt0), (net1, opt1))[which], {arguments})"
        elif p.form in ("each", "split"):
            call = f"(step0, step1)[which]({arguments})"
        body += [f"result = {call}", "trace.note(result)"]
        for i, optimizer in enumerate(p.optimizers):
            if optimizer.schedule is not None:
                body.append(f"sched{i}.step()")
        if p.form not in ("given", "each", "split"):
            return [f"for i in range({len(p.order)}):", *indented(body)]
        return [f"for i, which in enumerate({literal(p.order)}):", *indented(body)]

    def text(self) -> str:
        p = self.p
        found = self.set_up()
        if any("hook" in event.kind for event in p.events):
            found.append("hooks = []")
        if p.form == "each":
            found += ["def make(net, opt):", *indented([*self.step(0), "return step0"])]
            found += [f"step{i} = engine.step(make(net{i}, opt{i}))" for i in range(2)]
        elif p.form == "pipeline":
            found.append(f"schedule = pipeline(net0, {p.pipeline!r}, engine, F.mse_loss)")
        if p.form != "each":
            for i in range(len(p.steps)):
                found += [*self.step(i), f"step{i} = engine.step(step{i})"]
        found += [f"engine.parts(net{i})" for i in range(len(p.models))]
        state = [f"net{i}=net{i}, opt{i}=opt{i}" for i in range(len(p.models))]
        state += ["scaler=scaler"] if p.scaler is not None else []
        state += [f"average{i}=average{i}" for i in range(len(p.models))] if p.average is not None else []
        found += [f"trace = start(lambda: dict({', '.join(state)}))", *self.loop(), "trace.end()"]
        return "\n".join(["def program(engine, start):", *indented(found)]) + "\n"


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def source(program: Program) -> str:
    """The program as a function `program(engine, start)`, to be run after the names of the runtime are there."""
    return Source(program).text()


def as_script(program: Program, engine: str) -> str:
    """A self-contained script that runs the program eagerly and with an engine, and prints the difference."""
    text = source(program)
    main = [
        "if __name__ == '__main__':",
        f"    engine = ENGINES[{engine!r}]({dict(program.options)!r}, {program.shared!r})",
        *(
            ["    with one_rank():", "        print(judge(program, engine))"]
            if engine == "stage"
            else ["    print(judge(program, engine))"]
        ),
    ]
    ending = "\n".join(main) + "\n"
    return _pruned(RUNTIME.read_text(encoding="utf-8"), text + ending) + "\n\n" + text + "\n\n" + ending


def _pruned(runtime: str, user: str) -> str:
    """The runtime without functions and classes that neither the program nor what it uses names."""
    module = ast.parse(runtime)
    defined = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    needed: set[str] = set()
    todo = [ast.parse(user), *(n for n in module.body if n not in defined.values())]
    engines = {"Whole", "Modules", "Callables", "Stages", "Engine"}
    while todo:
        names = {n.id for n in ast.walk(todo.pop()) if isinstance(n, ast.Name)} & defined.keys()
        todo += [defined[name] for name in names - needed]
        needed |= names
    lines = runtime.splitlines()
    for name, node in sorted(defined.items(), key=lambda item: -item[1].lineno):
        if name not in needed | engines:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            del lines[first - 1 : node.end_lineno]
    kept = [line for line in lines if not line.startswith("__all__")]
    text = "\n".join(kept)
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text
