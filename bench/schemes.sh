#!/usr/bin/env bash
# The studies of docs/results.md that compare schemes, one after another; what has run is not run again. The runs stay
# in runs/, the tables and charts go to bench/results/schemes/. About an hour and a half on two cores: close all else.
#
#   bench/schemes.sh                  all of them
#   bench/schemes.sh dqn a3c          only these
set -euo pipefail
cd "$(dirname "$0")/.."
troupe=.venv/bin/troupe
results=bench/results/schemes

study() { # name, options of troupe compare
    local name=$1
    shift
    "$troupe" compare LunarLander-v3 --name "$name" "$@"
    mkdir -p "$results/$name"
    for file in table.md table.csv cells.csv study.toml study-*.png learning.png; do
        for found in runs/$name/$file; do
            [ ! -e "$found" ] || cp "$found" "$results/$name/"
        done
    done
}

dqn() { # episodes, time and speed-up of every scheme
    study dqn --algo dqn --schemes local,locked,hogwild,parameter-server --workers 1,2,4 --seeds 3 --until solved,minutes=4
}
dqn-4-shards() {
    study dqn-4-shards --algo dqn --schemes parameter-server --shards 4 --workers 1,2,4 --seeds 3 --until solved,minutes=4
}
a3c() { # the quality of System C
    study a3c --algo a3c --schemes hogwild --workers 2 --seeds 3 --until minutes=2.5 --eval-episodes 500 --eval-every-s 900
}
ablation() { # its table of gamma and batch
    study ablation --algo a3c --schemes hogwild --workers 2 --seeds 1 --gamma 0.95,0.99,0.999 --rollout-steps 30,60,120 \
        --until minutes=0.75 --eval-episodes 500 --eval-every-s 900
}
delay() { # what coordination costs where a step takes 10 ms
    study delay --algo a3c --schemes hogwild,parameter-server,actor-learner --workers 1,2,8,32 --seeds 1 \
        --envs-per-worker 1 --env-delay-ms 10 --rollout-steps 20 --until minutes=0.5 --eval-episodes 2
}
two-workers() { # the real environment on two cores
    study two-workers --algo a3c --schemes hogwild --workers 1,2 --seeds 3 --envs-per-worker 16 --env-threads 1 \
        --until minutes=0.25 --eval-episodes 2 --eval-every-s 900
}
exchange() { # what sharing costs a gradient
    .venv/bin/python bench/exchange.py --out "$results/exchange.json"
}
dqn-speed() { # beside Stable-Baselines3
    .venv/bin/python bench/dqn_speed.py --out "$results/dqn_speed.json"
}

mkdir -p "$results"
for name in ${*:-exchange dqn-speed two-workers delay dqn dqn-4-shards a3c ablation}; do
    echo "== $name"
    "$name"
done
