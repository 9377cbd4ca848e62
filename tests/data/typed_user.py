"""A user's program, for a type checker alone: it is never run."""

import numpy as np

import hybridc

compiled = hybridc.compile("m.onnx", "m.hyb", target="cuda+avx2", gpu_memory=64 << 20, shapes={"x": (1, 3)})
if compiled.path is not None and compiled.plan is not None:
    microseconds: float = compiled.plan.makespan_us
planned = hybridc.plan("m.onnx", gpu_memory=["50%", 1 << 20])
budgets: list[int | None] = [plan.budget_bytes for plan in planned.plans]
with hybridc.load("m.hyb", gpu_memory="64MiB", threads=2) as session:
    outputs = session.run(None, {"x": np.zeros((1, 3), np.float32)})
    total: float = float(outputs[0].sum())
    names: list[str] = [port.name for port in session.get_inputs()]
steps: float = hybridc.plan_training("m.onnx", loss="mse")["step"].plan.makespan_us
made = hybridc.compile_training("m.onnx", "s.hyb", loss="mse", batch=4)
with hybridc.load_training("s.hyb") as training:
    loss: float = training.step(np.zeros(3), np.zeros(1))
try:
    hybridc.compile(b"")
except hybridc.HybridcError as error:
    code: str = error.code
