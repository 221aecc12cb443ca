"""Checkpoints: safetensors and JSON only, complete or absent, digests checked before use.

A checkpoint is `step_00000120/{manifest.json, state.json, model.safetensors,
optimizer/rank_00000.safetensors, rank_states.safetensors, fp8.safetensors}` beside `LATEST`; the
last file exists only for FP8 products. Parameter names are Hugging Face's. During writing its name
begins with a dot; it is renamed when every file is on disk.
"""
