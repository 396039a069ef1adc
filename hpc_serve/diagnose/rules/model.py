"""The model and what was asked of the engine: files, access, configs, options."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "unknown-option",
        r"(?:error: unrecognized arguments:|does not know the option) (?P<words>.+)",
        "this vLLM does not know the option {words}",
        "`hpc-serve submit` checks options after -- before it submits; `vllm serve --help=all` in the job's "
        "environment "
        "lists them.",
    ),
    rule(
        "bad-option",
        r"(?:error|command line): (?P<words>argument .+|ambiguous option.+|the following arguments are required.+)",
        "vLLM refuses its command line: {words}",
        "`vllm serve --help=all` in the job's environment lists options and values.",
    ),
    rule(
        "gated-model",
        r"GatedRepoError|gated repo|Access to model \S+ is restricted",
        "the Hugging Face hub gives this model only to people who were given access",
        "Accept its terms on the hub, then `hf auth login` (or HF_TOKEN) where the weights are downloaded: best on the "
        "login node, before the job.",
    ),
    rule(
        "hub-unreachable",
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|We couldn't connect to 'https://|"
        r"OfflineModeIsEnabled|"
        r"(?:MaxRetryError|ConnectError|ConnectionError).*(?:huggingface|hf\.co)|Temporary failure in name resolution",
        "the weights are not on the cluster, and the node cannot reach the Hugging Face hub",
        "Fetch them on the login node with `hpc-serve fetch MODEL`, to an HF_HOME that the nodes see, or name a folder "
        "with --model.",
    ),
    rule(
        "hub-proxy",
        r"ProxyError|Tunnel connection failed: \d+|CERTIFICATE_VERIFY_FAILED",
        "a proxy or its certificate stands between the node and the Hugging Face hub",
        "Set https_proxy and SSL_CERT_FILE as your site's documentation says, or download on the login node.",
    ),
    rule(
        "hub-too-many-requests",
        r"429 (?:Client Error|Too Many Requests)",
        "the Hugging Face hub refuses this address for too many requests",
        "Download once on the login node (`hpc-serve fetch MODEL`); HF_TOKEN raises the limit.",
    ),
    rule(
        "model-absent",
        r"Repo id must be in the form .*?: '(?P<name>[^']+)'|Repository Not Found|"
        r"is not a local folder and is not a valid model identifier|"
        r"Invalid repository ID or local directory specified: '(?P<folder>[^']+)'|RepositoryNotFoundError",
        "there is no such model on the node[[: {name}]][[: {folder}]]",
        "Check the name or path. A folder must be on a filesystem that the nodes see, and inside of what a container "
        "binds.",
    ),
    rule(
        "weights-cut-off",
        r"Error while deserializing header|MetadataIncompleteBuffer|incomplete metadata, file not fully covered|"
        r"InvalidHeaderDeserialization|HeaderToo(?:Large|Small)|PytorchStreamReader failed",
        "a file of the weights is incomplete or damaged",
        "Download it again (`hf download MODEL --force-download`), and look at free space and quota before. A file of "
        "a "
        "few hundred bytes is a Git LFS pointer.",
    ),
    rule(
        "no-weights",
        r"Cannot find any model weights with `?(?P<folder>[^`\s]+)",
        "{folder} holds no weights",
        "Download them (`hpc-serve fetch MODEL`), or name the folder that holds *.safetensors.",
    ),
    rule(
        "file-missing",
        r"does not appear to have (?:a )?files? named (?P<file>[^\s'\"]+)|Can't load (?:the )?(?:tokenizer|"
        r"\w*config\w*) (?:for|of)|"
        r"No such file or directory: '?(?P<path>\S+\.(?:safetensors|json|model|bin|jinja))|No (?:config|"
        r"tokenizer)\S* found in",
        "a file of the model is missing[[: {file}]][[: {path}]]",
        "Download the whole model (`hpc-serve fetch MODEL`); an interrupted download leaves files out.",
    ),
    rule(
        "tokenizer-missing",
        r"Couldn't instantiate the backend tokenizer",
        "a file of the model is missing: its tokenizer, or what converts it (sentencepiece, tiktoken)",
        "Download the whole model (`hpc-serve fetch MODEL`). Where it has no tokenizer.json on purpose, install "
        "sentencepiece or tiktoken beside vLLM.",
    ),
    rule(
        "checkpoint-differs",
        r"weights were not initialized from checkpoint|There is no module or parameter named|size mismatch for|"
        r"KeyError: '(?:model\.)?layers\.\d|"
        r"Attempted to load weight .* into parameter",
        "the weights are not those of the model that config.json describes",
        "Files of two models or of two versions lie in one folder, or this vLLM reads the model differently: download "
        "it "
        "anew into an empty folder.",
    ),
    rule(
        "bad-json",
        r"It looks like the config file at '(?P<file>[^']+)' is not a valid JSON|"
        r"(?<!\S)(?P<path>\S+\.json)'? is not a valid JSON file|JSONDecodeError",
        "a JSON file of the model is damaged[[: {file}]][[: {path}]]",
        "Download it again.",
        kind="error",
    ),
    rule(
        "unknown-architecture",
        r"[Mm]odel architectures? \[?(?P<name>[^\]]+?)\]? (?:is|are) not supported|has no vLLM implementation|"
        r"Transformers does not recognize this architecture|is not supported in vLLM",
        "this vLLM or its transformers does not know the model's architecture[[ ({name})]]",
        "A newer vLLM may: `hpc-serve plan --model MODEL` says what the pinned version knows.",
    ),
    rule(
        "custom-code",
        r"trust[_-]remote[_-]code=True|contains custom code which must be executed",
        "the model brings code of its own, and nobody has allowed it",
        "Read that code, then add --trust-remote-code (after --).",
    ),
    rule(
        "layout-refused",
        r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<size>\d+)\)|"
        r"(?<!\S)(?P<what>\S+) (?:is|must be) (?:not )?divisible by (?:tensor|tp|pipeline)\S*",
        "the model cannot be divided like this[[: {heads} attention heads by a tensor parallel size of {size}]]",
        "`hpc-serve plan` lists the layouts that are possible.",
        pains=(23,),
    ),
    rule(
        "context-too-long",
        r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
        r"\((?:max_position_embeddings=)?(?P<most>[\d.]+)",
        "--max-model-len {asked} is more than the model was made for ({most})",
        "Set --max-model-len to {most} or less.",
        pains=(23,),
    ),
    rule(
        "quantization-refused",
        r"[Qq]uantization method .*(?:not supported|does not match)|Unknown quantization method|"
        r"[Tt]he quantization method \S+ is not supported for the current GPU",
        "this quantization does not go with the model or the GPUs",
        "Leave out --quantization for a checkpoint that is quantized already; `hpc-serve plan` says what the GPUs can "
        "do.",
    ),
    rule(
        "unknown-parser",
        r"invalid (?P<kind>tool call|reasoning) parser: (?P<name>\S+)",
        "vLLM has no {kind} parser {name}",
        "The message lists those there are.",
    ),
    rule(
        "parser-token",
        r"could not locate (?:the )?(?P<token>.+?) in the tokenizer",
        "a parser of tool calls or reasoning does not fit the model: its tokenizer has no {token}",
        "Leave --tools out, or name the parser that the model's card names: --tool-call-parser or --reasoning-parser "
        "(after --).",
    ),
    rule(
        "settings-refused",
        r"(?:^\s*Value error,|refuses the settings:) (?P<words>.+?)(?: \[type=.*)?$",
        "vLLM refuses the settings: {words}",
        "Change the option that the message names.",
        kind="error",
    ),
)
