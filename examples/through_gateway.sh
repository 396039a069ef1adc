#!/bin/bash
# Any OpenAI client by a gateway of its own, which follows the service's replicas: bash examples/through_gateway.sh SERVICE COMMAND …
# The command finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment. With EleutherAI's lm-evaluation-harness, for one:
#   bash examples/through_gateway.sh 70b bash -c 'lm_eval --model local-chat-completions --apply_chat_template \
#     --tasks gsm8k --model_args "model=70b,base_url=$OPENAI_BASE_URL/chat/completions,num_concurrent=64,tokenizer_backend=None"'
set -euo pipefail
if [[ $# -lt 2 ]]; then
    echo "name a service and a command: bash examples/through_gateway.sh SERVICE COMMAND …" >&2
    exit 1
fi
service=$1
shift
folder=$(mktemp -d)
hpc-serve gateway "$service" --port 0 --key-file "$folder/key" >"$folder/variables" &
gateway=$!
trap 'kill "$gateway"; wait "$gateway" || true; rm -r "$folder"' EXIT
until grep -q OPENAI_API_KEY "$folder/variables"; do
    kill -0 "$gateway" || exit 1
    sleep 0.2
done
eval "$(grep '^export ' "$folder/variables")"
"$@"
