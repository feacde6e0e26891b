# Below the #SBATCH lines and variables that abovemup.studies.sbatch writes.
export PYTHONSAFEPATH=1 SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
cd "$here" || exit
leg=${SLURM_RESTART_COUNT:-0}
if [ "$leg" -gt 0 ] && [ -e "$run/config.yaml" ]; then
    command=("${again[@]}")
else
    command=("${first[@]}")
fi
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Slurm warns before the time is over: the run keeps a checkpoint, and the job goes back into the queue.
warned=
trap 'trap "" USR2; warned=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR2
srun "$python" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$nproc" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$host:$((20000 + SLURM_JOB_ID % 10000))" \
    --shutdown-timeout=120 -m abovemup train "${command[@]}" &
wait $!
code=$?
if [ -n "$warned" ]; then
    wait $!  # the first one was ended by the signal
    code=$?
    if [ $code -ne 0 ] && [ "$leg" -lt "$legs" ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit $code
