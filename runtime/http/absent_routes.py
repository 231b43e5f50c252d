"""Parts of the APIs of OpenAI and Anthropic that this server has not, and what it has in their place. Their
clients know these routes, so the 404 says what to call."""

NO_ACCOUNTS = (
    "this server has no accounts: keys are options (--api-key, --api-key-file), and usage is in /metrics and "
    "in each answer"
)
NO_AGENTS = (
    "agents run in the client here; /v1/responses and /v1/messages answer with calls of the tools that the "
    "client has"
)
NO_MACHINES = "this server runs no code and has no machines; tools run in the client"
NO_TRAINING = "models are not trained or judged here; adapters are loaded with /v1/load_lora_adapter"
NO_PICTURES = "this server makes neither pictures nor videos; chats take them as input"
# the first folder behind /v1/ -> what there is
INSTEAD = {
    "agents": NO_AGENTS,
    "assistants": "use /v1/responses with /v1/conversations in place of assistants and threads",
    "chatkit": NO_AGENTS,
    "complete": "use /v1/messages, or /v1/completions for a plain text",
    "compliance": NO_ACCOUNTS,
    "containers": NO_MACHINES,
    "content_provenance_checks": NO_PICTURES,
    "decisions": "use /v1/score, /v1/classify or /v1/chat/completions with a response_format",
    "deployment_runs": NO_AGENTS,
    "deployments": NO_AGENTS,
    "dreams": NO_AGENTS,
    "environments": NO_MACHINES,
    "evals": NO_TRAINING,
    "fine_tuning": NO_TRAINING,
    "images": NO_PICTURES,
    "live": "streams with sound are not served; use /v1/ws for many requests on one connection",
    "memory_stores": NO_AGENTS,
    "moderations": "use /v1/classify with a classifier, or a chat with a model that was trained to moderate",
    "organization": NO_ACCOUNTS,
    "organizations": NO_ACCOUNTS,
    "projects": NO_ACCOUNTS,
    "realtime": "streams with sound are not served; use /v1/ws for many requests on one connection",
    "safety": NO_ACCOUNTS,
    "sessions": NO_AGENTS,
    "skills": NO_AGENTS,
    "systemone": "that is a service of Ollama's own cloud",
    "threads": "use /v1/responses with /v1/conversations in place of assistants and threads",
    "tunnels": NO_MACHINES,
    "user_profiles": NO_ACCOUNTS,
    "vaults": NO_ACCOUNTS,
    "vector_stores": "there is no search; /v1/embeddings and /v1/rerank are what it is made of",
    "videos": NO_PICTURES,
    "webhook_endpoints": "this server calls no addresses; ask for the state, or read the stream",
    "webhook_event_types": "this server calls no addresses; ask for the state, or read the stream",
}
# folders below those that are served
BELOW = {
    "audio/speech": "this server makes no sound; /v1/audio/transcriptions and /v1/audio/translations read it",
    "audio/voice": "this server makes no sound; /v1/audio/transcriptions and /v1/audio/translations read it",
    "models/": "this server has one model, chosen with --model-path when it starts",
    "chat/completions": "chat completions are not stored; /v1/responses are",
}
ROOT = "/v1/"


def instead(path: str) -> str:
    """What there is in place of a route that this server has not; empty: nothing is known of the route."""
    if not path.startswith(ROOT):
        return ""
    rest = path.removeprefix(ROOT)
    below = next((what for prefix, what in BELOW.items() if rest.startswith(prefix)), "")
    return below or INSTEAD.get(rest.partition("/")[0], "")
