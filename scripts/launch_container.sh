#!/usr/bin/env bash
# Run a command in a container with all GPUs, the host's network and memory, the current folder and /data.
#   bash scripts/launch_container.sh --image IMAGE [--cmd "COMMAND"] [--extra-mount DIR] [--proxy URL] [--no-interactive]
# IMAGE contains gptlm. Without --cmd it opens a shell. --extra-mount: default /data if it exists. Flags are --flag VALUE
# or --flag=VALUE; OneFlow's --src, --py and --wheel are accepted without effect.
set -euo pipefail

image="" cmd="" extra="" proxy="" interactive=1
refuse() { echo "launch_container.sh: error: $1" >&2; exit "${2:-2}"; }
note() { echo "launch_container.sh: $1" >&2; }

while [ $# -gt 0 ]; do
    word=${1%%=*} value=""
    case $1 in
        --no-interactive) interactive=0; shift; continue ;;
        -h | --help) sed -n '2,5s/^# *//p' "$0"; exit 0 ;;
        --*=*) value=${1#*=}; shift ;;
        --*) [ $# -ge 2 ] || refuse "$1 is unknown or lacks its value; --help lists the flags"; value=$2; shift 2 ;;
        *) refuse "unexpected argument '$1'; a command with spaces needs quotes: --cmd \"...\"" ;;
    esac
    case $word in
        --image) image=$value ;;
        --cmd) cmd=$value ;;
        --extra-mount | --extra_mount) extra=$value ;;
        --proxy) proxy=$value ;;
        --src) note "--src has no effect: the current folder is mounted, gptlm comes with the image" ;;
        --py) note "--py has no effect: the image's Python is used" ;;
        --wheel) note "--wheel has no effect: OneFlow is not used, gptlm comes with the image" ;;
        *) refuse "$word is unknown; --help lists the flags" ;;
    esac
done

[ -n "$image" ] || refuse "give --image IMAGE, a Docker image with gptlm in it"
if [ -z "$extra" ] && [ -d /data ]; then extra=/data; fi
[ -z "$extra" ] || [ -d "$extra" ] || refuse "--extra-mount $extra is not a folder"
if [ -z "$cmd" ] && [ "$interactive" = 0 ]; then refuse "--no-interactive needs --cmd \"...\""; fi
if [[ $cmd =~ ^python[0-9.]*\ +(-u\ +)?-m\ +(oneflow_gpt\.training|paddle\.distributed\.launch)($|[[:space:]]) ]]; then
    note "the command is run by gptlm launch"
    cmd="gptlm launch $cmd"
fi

run=(docker run --rm --init --gpus all --network host --ipc host --ulimit memlock=-1 --volume "$PWD:$PWD" --workdir "$PWD")
if [ "$interactive" = 1 ] && [ -t 0 ] && [ -t 1 ]; then run+=(--interactive --tty); fi
if [ -n "$extra" ]; then extra=$(cd "$extra" && pwd); run+=(--volume "$extra:$extra"); fi
if [ -n "$proxy" ]; then
    for name in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; do run+=(--env "$name=$proxy"); done
fi
run+=("$image" bash)
if [ -n "$cmd" ]; then run+=(-c "$cmd"); fi

printf '%q ' "${run[@]}"; echo
command -v docker >/dev/null || refuse "docker is not installed here; install Docker with NVIDIA's container toolkit" 1
exec "${run[@]}"
