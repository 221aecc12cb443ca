"""A run writes down its config and machine, and nothing of what its environment hides."""

from pathlib import Path

from support import run_cli

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "value-of-aws-4f1d",
    "HF_TOKEN": "hf_value-of-hf-77aa",
    "WANDB_API_KEY": "value-of-wandb-19c2",
    "GITHUB_TOKEN": "ghp_value-of-github-03be",
    "DATABASE_URL": "postgres://user:value-of-database-5e6f@host/name",
    "MY_PASSWORD": "value-of-password-a9d0",
    "HTTPS_PROXY": "http://user:value-of-proxy-2b3c@127.0.0.1:9",
}


def test_no_secret_of_the_environment_is_written(
    synthetic_data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine host login user password value-of-netrc-8d7e\n")
    run_dir = tmp_path / "run"
    places = ["--config", tiny_config, "--data", synthetic_data, "--run-dir", run_dir]
    done = run_cli(*("train", *places, "--set", "run.max_steps=10"), **SECRETS, HOME=str(home))
    assert done.returncode == 3, done.stderr
    written = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    names = {path.name for path in written}
    assert {"environment.json", "config.toml", "stdout.log", "result_0.txt"} <= names
    written[Path("what was printed")] = (done.stdout + done.stderr).encode()
    for secret in (*SECRETS.values(), "value-of-"):
        assert [path for path, text in written.items() if secret.encode() in text] == []
