"""Save, verify and load checkpoints of a run.

A checkpoint is a directory such as `step_00000120/`, next to a file `LATEST` that names the newest
checkpoint. It contains the safetensors files `model.safetensors`, `rank_states.safetensors` and
`optimizer/rank_00000.safetensors` (one per optimizer shard), and the JSON files `state.json` and
`manifest.json`. If the model computes in FP8, the checkpoint also contains `fp8.safetensors`. The
manifest contains the SHA-256 digest of every other file, which readers check before they use the
file. Parameters have the same names as in Hugging Face models.

While the files are being written, the directory's name begins with a dot. The writer renames the
directory once every file is on disk, so a checkpoint is either complete or absent.
"""
