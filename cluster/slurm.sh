#!/usr/bin/env bash
# A LoRA run over whole Gaudi servers under Slurm, 8 cards each.
#   sbatch cluster/slurm.sh                                  the 70b experiment on one server
#   sbatch --nodes 2 cluster/slurm.sh +experiment=70b_llama3 train.max_steps=100
# The first server of the allocation starts the ranks of all by ssh: the repository and its .venv at the same path on each, ssh
# between them without a password. Results: outputs/ here, which every server must see.
#SBATCH --job-name=llama-lora
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --time=04:00:00
#SBATCH --output=slurm-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}"

python=.venv/bin/python
[ -x "$python" ] || { echo "error: $PWD/.venv is missing; run make setup there" >&2; exit 2; }
[ "$#" -gt 0 ] || set -- +experiment=70b

hosts=$(mktemp "$PWD/hosts.XXXXXX")
trap 'rm -f "$hosts"' EXIT
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/ slots=8/' >"$hosts"

if [ "$(wc -l <"$hosts")" -gt 1 ]; then
  "$python" scripts/gaudi_spawn.py --hostfile "$hosts" --use_deepspeed recipes/lora.py "$@"
else
  "$python" scripts/gaudi_spawn.py --world_size 8 --use_deepspeed recipes/lora.py "$@"
fi
