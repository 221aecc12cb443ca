"""Checkpoints: safetensors and JSON files, whose digests are checked before use.

A checkpoint is a directory `step_00000120/` next to a file `LATEST`. It contains `manifest.json`,
`state.json`, `model.safetensors`, `optimizer/rank_00000.safetensors`, `rank_states.safetensors`
and, if the model has FP8 products, `fp8.safetensors`. The parameters have Hugging Face's names.
While the files are being written, the directory's name begins with a dot. It is renamed once every
file is on disk, so a checkpoint is either complete or absent.
"""
