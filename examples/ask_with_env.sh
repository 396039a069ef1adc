#!/bin/bash
# Any OpenAI client or evaluation harness, by `hpc-serve env` alone: bash examples/ask_with_env.sh SERVICE COMMAND …
# The command finds OPENAI_BASE_URL, OPENAI_API_KEY and the certificates to trust in its environment. Without a command
# the models are listed by curl. With EleutherAI's lm-evaluation-harness, for one:
#   bash examples/ask_with_env.sh 70b bash -c 'lm_eval --model local-chat-completions --apply_chat_template \
#     --tasks gsm8k --model_args "model=70b,base_url=$OPENAI_BASE_URL/chat/completions,num_concurrent=64"'
set -euo pipefail
service=${1:?name a service: bash examples/ask_with_env.sh SERVICE COMMAND …}
shift
variables=$(hpc-serve env "$service")
eval "$variables"
if [[ $# -gt 0 ]]; then
    exec "$@"
fi
# The key goes by standard input: other users of a node see command lines.
printf 'header = "Authorization: Bearer %s"\n' "$OPENAI_API_KEY" |
    curl --silent --show-error --fail --config - "$OPENAI_BASE_URL/models"
