# shellcheck shell=bash disable=SC2034,SC2154 # slurm.sh and run_and_time.sh share these variables.
# Sourced by slurm.sh: tells NCCL which InfiniBand adapters to use, and hands them to the container. The nodes of a job
# must have the same adapters, because this runs only on the first node. It reads:
#
#   NCCL_IB_HCA    the adapters to use                           [those under the same PCIe root port as a GPU]
#   MELLANOX_VISIBLE_DEVICES   what enroot's hook for InfiniBand makes visible in the container     [all]
#   SHARP=1        lets the network's switches sum the gradients

# Print the InfiniBand adapters for training, separated by commas. A DGX node also has adapters for storage. These are
# not under the same PCIe root port as a GPU, and must not be used.
compute_adapters() { # [directory instead of /sys]
    local sys=${1:-/sys} gpu adapter roots=" " path found=()
    for gpu in "$sys"/bus/pci/drivers/nvidia/*:*; do
        [ -e "$gpu" ] || continue
        roots+="$(root_port "$gpu") "
    done
    for adapter in "$sys"/class/infiniband/*; do
        path=$(root_port "$adapter/device")
        if [[ -n $path && $roots == *" $path "* ]]; then found+=("${adapter##*/}"); fi
    done
    (IFS=,; echo "${found[*]-}")
}

root_port() { # device in sysfs; prints the part of its path that ends with the root port
    { readlink -f "$1" || true; } | sed -nE 's|.*/(pci[^/]*/[^/]*)/.*|\1|p'
}

device_mounts() { # [directory instead of /dev]; prints mounts for pyxis, which are needed where enroot's hook is off
    local device
    for device in "${1:-/dev}"/infiniband/uverbs* "${1:-/dev}"/infiniband/rdma_cm; do
        [ ! -e "$device" ] || printf ',%s' "$device:$device"
    done
}

if [ -z "${NCCL_IB_HCA:-}" ]; then
    adapters=$(compute_adapters)
    if [ -n "$adapters" ]; then
        export NCCL_IB_HCA="=$adapters" # "=" asks for exact names, because mlx5_1 is also a prefix of mlx5_10
        echo "InfiniBand adapters near the GPUs: $adapters (NCCL_IB_HCA)"
    fi
fi
if [ "${SHARP:-0}" = 1 ]; then
    export NCCL_COLLNET_ENABLE=${NCCL_COLLNET_ENABLE:-1} NCCL_GRAPH_REGISTER=${NCCL_GRAPH_REGISTER:-1}
fi
# Without such adapters, enroot's hook for them fails, and no container starts.
if [ -n "${CONT:-}" ] && compgen -G '/sys/class/infiniband/mlx*' >/dev/null; then
    export MELLANOX_VISIBLE_DEVICES=${MELLANOX_VISIBLE_DEVICES:-all}
fi
