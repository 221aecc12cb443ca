#!/usr/bin/env bash
# Install the programs that the tests in this directory and in tests/network use, if they are missing. Needs Debian and
# root.
set -euo pipefail

missing=()
command -v slurmctld >/dev/null || missing+=(slurm-wlm slurmctld slurmd slurm-client munge)
command -v rsync >/dev/null || missing+=(rsync)
command -v ip >/dev/null || missing+=(iproute2)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/slurm/install.sh: error: ${missing[*]}: not installed; install them, or run this as root on Debian" >&2
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
