"""Checkpoints: safetensors and JSON only, complete or absent, digests checked before use.

`step_00000120/{manifest.json, state.json, model.safetensors, optimizer/rank_00000.safetensors,
rank_states.safetensors, fp8.safetensors}` beside `LATEST`; the last only where products are FP8.
Parameter names are Hugging Face's. While it is written a checkpoint has another name, which begins
with a dot; it gets its own when every file is on disk.
"""
