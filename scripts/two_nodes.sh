#!/usr/bin/env bash
# Two nodes on one machine: two torchrun agents in network namespaces, each with its own address.
#   scripts/two_nodes.sh PROGRAM [ARGUMENTS]      two ranks on each node; needs user namespaces
# Exits with 77 where namespaces are not allowed.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
  unshare -rn true 2>/dev/null && command -v ip >/dev/null || exit 77
  exec unshare -rn "$0" --inside "$@"
fi
shift

# This shell is the first node; a sleeping process holds the namespace of the second.
unshare -n sleep 600 &
second=$!
trap 'kill $second 2>/dev/null' EXIT
until [ "$(readlink /proc/$second/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
there=(nsenter --target "$second" --net)

ip link add cable0 type veth peer name cable1 netns "$second"
ip address add 10.77.0.1/24 dev cable0
"${there[@]}" ip address add 10.77.0.2/24 dev cable1
for link in lo cable0; do ip link set "$link" up; done
for link in lo cable1; do "${there[@]}" ip link set "$link" up; done

# Both nodes bear this machine's name, so the first is told that it is the endpoint.
run=(python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d
  --rdzv-endpoint 10.77.0.1:29400 --rdzv-id two_nodes)
"${there[@]}" "${run[@]}" --rdzv-conf is_host=0 --local-addr 10.77.0.2 "$@" &
other=$!
status=0
"${run[@]}" --rdzv-conf is_host=1 --local-addr 10.77.0.1 "$@" || status=$?
wait "$other" || status=$?
exit "$status"
