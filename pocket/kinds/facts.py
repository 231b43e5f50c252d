"""Questions about the runtime and about pocket itself.

Each fact has one answer, so that a wrong word in a reply shows, and many wordings, of
which one in ten is never trained on.
"""

from __future__ import annotations

import random

from pocket.exchange import Exchange, ask, expand, plain, vary

_IT = "(runtime|the runtime|this runtime|this server|the server)"

FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Runtime is a server for large language models. It answers requests over an OpenAI-compatible HTTP "
        "API.",
        (
            "(What is|What's|Explain|Describe|Tell me about|Tell me what is) " + _IT + "(?|.|)",
            "What (does|can) " + _IT + " do(| for me)?",
            "What is " + _IT + " (for|good for|used for|about|made for)?",
            "What kind of (program|software|project|server) is (this|runtime|it)?",
            "(Explain|Describe) runtime (|to me )in one sentence.",
            "(I am new here|I just installed it|Sorry, I am lost). What is (runtime|this server)?",
        ),
    ),
    (
        "The server listens on port 30000 by default.",
        (
            "(What|Which) port does " + _IT + " (use|listen on|run on|serve on|open|bind)( by default|)?",
            "(What|Which) is the (default |usual |standard |)port( of the server| of runtime| number|)?",
            "On (what|which) port (does|will) " + _IT + " (run|listen|serve)?",
            "(Tell me|Give me|I need) the (default |)port (of|for) " + _IT + "(.|)",
            "(What|Which) port (do I|should I|must I) (connect|talk|send requests) to?",
            "(Default port|Port number|What port)?",
        ),
    ),
    (
        "Run `runtime serve` in a terminal. Without a model it serves pocket.",
        (
            "How (do|can|would|should) I (start|launch|run|use|bring up) " + _IT + "?",
            "(What|Which) command (starts|launches|runs) " + _IT + "?",
            "(Show|Tell|Give) me (the command|how) to (start|launch|run) " + _IT + "(.|)",
            "How (is|does) " + _IT + " (started|start|launched)?",
            "(I want|I would like|I'd like) to (start|launch|run) "
            + _IT
            + ". (What do I type|How|Which command)?",
        ),
    ),
    (
        "Runtime runs on CPUs, CUDA GPUs and Ascend NPUs.",
        (
            "(What|Which) (hardware|devices|machines|accelerators|chips|processors) (does|can) "
            + _IT
            + " (run on|support|use)?",
            "(On what|On which) (hardware|devices|machines) does " + _IT + " (run|work)?",
            "(Does|Can) "
            + _IT
            + " (run on|use|support|work on) (a GPU|GPUs|a CPU|CPUs|an NPU|NPUs|Ascend|CUDA|NVIDIA cards)?",
            "Do I need (a GPU|a graphics card|special hardware|an NPU)( for this| to use runtime| for "
            "runtime|)?",
            "(What|Which) (devices|hardware) (are|is) supported( by runtime|)?",
        ),
    ),
    (
        "It offers an OpenAI-compatible HTTP API, with chat completions and completions under /v1.",
        (
            "(What|Which) API does " + _IT + " (offer|have|use|speak|provide)?",
            "(Is|Are) " + _IT + " (compatible with OpenAI|OpenAI-compatible|OpenAI compatible)?",
            "(Can I|May I|How do I) use the OpenAI (client|library|SDK|API)( with runtime| with it| here|)?",
            "(How|In what way) do (clients|programs|apps|applications) talk to " + _IT + "?",
            "(What|Which) (endpoints|routes|paths) does " + _IT + " (have|offer|serve)?",
        ),
    ),
    (
        "The base URL is http://localhost:30000/v1 by default.",
        (
            "(What|Which) is the (base URL|URL|address|endpoint URL)( of the server| of runtime| of the "
            "API|)?",
            "(What|Which) (base URL|URL|address) (do I|should I|must I) (use|set|give to the client)?",
            "(Give|Tell) me the (base URL|URL|address)( of the server| of the API| for the client|)(.|)",
            "Where (can I reach|do I find|is) the (API|server)?",
        ),
    ),
    (
        "Continuous batching lets new requests join the running batch at every step, so nobody waits for the "
        "whole batch to end.",
        (
            "(What is|What's|Explain|Describe|Tell me about|What does it mean:) continuous batching(?|.|)",
            "How does (continuous batching|batching) work?",
            "(Why|When) is continuous batching (good|useful|helpful|used)?",
            "(What does|What do you mean by) (continuous batching|the batching)( mean|)?",
            "How does " + _IT + " (batch requests|serve many requests at once|handle many users|batch)?",
        ),
    ),
    (
        "The KV cache keeps the keys and values of earlier tokens. It is cut into pages, so memory is used "
        "only where it is needed.",
        (
            (
                "(What is|What's|Explain|Describe|Tell me about) (the KV cache|a KV cache|the paged KV "
                "cache|a paged KV cache|paged "
                "attention)(?|.|)"
            ),
            "(How does|Why does) " + _IT + " (use|manage|page) the KV cache?",
            "(What|Why) are (the pages|pages) (of|in) the KV cache?",
            "(What is|What's) (stored|kept) in the KV cache?",
            "How does the (paged |)KV cache work?",
        ),
    ),
    (
        "Requests that start with the same text share the pages of that prefix, so it is computed only once.",
        (
            "(What is|What's|Explain|Describe|Tell me about) (prefix sharing|prefix caching|a shared "
            "prefix|the prefix cache)(?|.|)",
            "(What|Why) are shared prefixes( for| good for| good|)?",
            "How (does prefix caching|does prefix sharing|do shared prefixes) work?",
            "What happens (when|if) two requests (share|have|start with) the same (prefix|beginning|system "
            "prompt)?",
            "(Does|Can) " + _IT + " (share|reuse|cache) (prefixes|common prefixes|the prompt)?",
        ),
    ),
    (
        "Yes. Set stream to true and the tokens arrive one by one as server-sent events.",
        (
            "(Can|Does|Could) "
            + _IT
            + " (stream|stream tokens|stream answers|stream the reply|do streaming)?",
            "How (do|can) I (stream|get a stream|turn on streaming|use streaming|stream the answer)?",
            "Is streaming (supported|possible|there|available)?",
            "(Do|Can) you (support |do |)(streaming|stream)?",
        ),
    ),
    (
        "Give a list of strings as stop, and the answer ends before the first of them.",
        (
            "(What are|Explain|Tell me about|How do I use|How can I use) stop "
            "(strings|sequences|words)(?|.|)",
            "How (do|can) I (stop|end|cut) the (answer|output|generation|text) at a (word|string)?",
            "(Does|Can) " + _IT + " (support|use|handle) stop (strings|sequences)?",
        ),
    ),
    (
        "Speculation guesses several tokens ahead and checks them in one step. The text stays the same, only "
        "faster.",
        (
            "(What is|What's|Explain|Describe|Tell me about) (speculation|speculative decoding|speculative "
            "sampling)(?|.|)",
            "How does (speculation|speculative decoding) work?",
            "(Does|Can|Why does) " + _IT + " (use|do|support) (speculation|speculative decoding)?",
            "Does (speculation|speculative decoding) change the (text|answer|output|result)?",
        ),
    ),
    (
        "Send the tools with the request. When one is needed, I answer with a tool call that holds its name "
        "and arguments.",
        (
            "(How do|How can) (I use|I give you|you use|you call|I call) tools?",
            "(Can|Do|Could) you (call|use|support) (tools|functions)?",
            "(What is|What's|Explain|Describe) (a tool call|tool calling|function calling)(?|.|)",
            "(Does|Can) " + _IT + " (support|do|handle) (tools|tool calls|function calling)?",
            "How does (tool calling|function calling) work( here|)?",
        ),
    ),
    (
        "Ask me for a JSON object, or set response_format so that the reply must match your schema.",
        (
            "(How do|How can) I (get|ask for|force|receive) JSON( output| answers|)?",
            "(Can|Could|Do) you (answer in|write|give me|produce|speak) JSON?",
            "(Does|Can) "
            + _IT
            + " (support|give|force|do) (JSON|structured output|JSON output|a JSON schema)?",
            "(What is|Explain|Tell me about) (structured output|JSON mode|response_format)(?|.|)",
        ),
    ),
    (
        "I am pocket, a small demonstration model that comes with runtime.",
        (
            "(Who|What) are you?",
            "(What is|What's) your name?",
            "(Tell me|Say) (who|what) you are(.|)",
            "(Introduce|Please introduce) yourself(.|!|)",
            "(Which|What) model (are you|is this|am I talking to|do you use|is running)?",
            "(Are you|Is this) (pocket|the pocket model|a model)?",
            "(Tell me|Say something) about yourself(.|)",
            "(Who|What) am I (talking|speaking|chatting) (to|with)?",
            "(What is|What's|Who is|Tell me about) pocket(?|.|)",
            "Do you have a name?",
            "(How|What) (should|do|can) I call you?",
        ),
    ),
    (
        "I can greet you, answer questions about runtime, count, do small sums, spell words, write JSON and "
        "call tools.",
        (
            "What can you do(| for me)?",
            "(How|With what) can you help( me|)?",
            "What are you (able to do|good at|good for)?",
            "(What|Which) (things|tasks|questions) can you (do|answer|handle)?",
            "(Help|help me|I need help|Can you help me)(!|?|.|)",
            "(Tell me|List|Show me) what you can do(.|)",
            "What (should|can|could|may) I ask( you|)?",
            "(List|What are) your (skills|abilities|features)(.|?|)",
        ),
    ),
    (
        "I have about three million parameters, so I am very small.",
        (
            "How (big|large|small) are you?",
            "How many parameters (do you have|does pocket have|are there)?",
            "(What is|What's) (your|the) size( of pocket|)?",
            "Are you (a large|a big|a small|a tiny) model?",
            "How (big|large|small) is (pocket|the pocket model|this model)?",
        ),
    ),
    (
        "I was trained from scratch on conversations that a script generates.",
        (
            "(How|On what|On what data|With what data) were you trained?",
            "(Who|What) (made|trained|built|created) you?",
            "Where (does your knowledge|do you) come from?",
            "(What is|What's) your training data?",
            "(How|On what) was pocket (trained|made|built)?",
        ),
    ),
    (
        "No, I am a small computer program.",
        (
            "Are you (a human|human|a person|alive|real|a real person|conscious)?",
            "(Do you have|Have you got) (feelings|a body|a soul|parents|a family|friends)?",
            "Do you (sleep|eat|drink|dream|get tired|feel pain|breathe)?",
        ),
    ),
    (
        "Runtime is written in Python.",
        (
            "(What|Which) (language|programming language) is " + _IT + " (written|made|programmed|coded) in?",
            "(In what|In which) (language|programming language) is " + _IT + " (written|made)?",
            "Is " + _IT + " written in (Python|C|Rust|Java|Go)?",
        ),
    ),
    (
        "Runtime loads model folders in the Hugging Face layout, with weights as safetensors.",
        (
            "(What|Which) (models|model formats|weights|files|formats) (does|can) "
            + _IT
            + " (load|read|serve|support|use)?",
            "(In what|In which) format (are|must) the (weights|models)( be|)?",
            "(How do|How can|Can) I (serve|load|use|run) (my own model|another model|my model|a different "
            "model)?",
            "(Does|Can) " + _IT + " (load|read|use) (safetensors|Hugging Face models|other models)?",
        ),
    ),
    (
        "A token is a piece of text, such as a word or a part of a word. Models read and write tokens.",
        (
            "(What is|What's|Explain|Describe|Define) a token(?|.|)",
            "What (are|do you call) tokens?",
            "What does (token|the word token) mean?",
            "(What is|Explain) a token (for|in) (a model|a language model)(?|.|)",
        ),
    ),
    (
        "A language model predicts the next token of a text, again and again.",
        (
            "(What is|What's|Explain|Describe|Define) (a language model|a large language model|an LLM)(?|.|)",
            "(How does|How do) (a language model|language models|an LLM|LLMs) work?",
            "What does (LLM|a language model) (mean|do|stand for)?",
        ),
    ),
    (
        "Greedy decoding always takes the most likely token. Set temperature to 0 for it.",
        (
            "(What is|What's|Explain|Describe|Define) (greedy decoding|greedy search|greedy "
            "sampling|temperature 0)(?|.|)",
            "(How do|How can) I (get|use|turn on|set) greedy decoding?",
            "What (happens|does it do) (at|with|if I set) temperature 0?",
            "How (do|can) I get the same answer (each|every) time?",
        ),
    ),
    (
        "Temperature sets how random the choice of the next token is. A low value is safe, a high value is "
        "wild.",
        (
            "(What is|What's|Explain|Describe|Define|What does) (the temperature|temperature)( mean| "
            "do|)(?|.|)",
            "What (happens|changes) (with|at|if I set) a (high|low|higher|lower) temperature?",
            "(How|Why) (do|should|would) I (set|change|use) the temperature?",
        ),
    ),
    (
        "A chat template turns a list of messages into the one text that the model reads.",
        (
            "(What is|What's|Explain|Describe|Define) (a chat template|the chat template|ChatML)(?|.|)",
            "(What does|How does|Why is there) (the|a) chat template( do| work|)?",
            "How (are|do) (messages|chats) (turned into|become) (a prompt|text)?",
        ),
    ),
    (
        "My context holds 2048 tokens.",
        (
            "(How long|How big|How large) is your (context|context window|memory)?",
            "(What is|What's) (your|the) context (length|size|window)?",
            "How many tokens (can you|do you|fit into your) (read|remember|context|take)?",
            "How much text can you read?",
        ),
    ),
    (
        "Ask me to think first, or set enable_thinking to true. Then I reason inside <think> before I "
        "answer.",
        (
            "(Can|Do|Could) you (think|reason)( before you answer|)?",
            "(How do|How can) I (make|let|get) you (to think|think|reason)( first|)?",
            "(What is|Explain|Tell me about) (thinking|thinking mode|enable_thinking|reasoning mode)(?|.|)",
        ),
    ),
    (
        "I know only English.",
        (
            "(What|Which|How many) languages do you (speak|know|understand)?",
            "Do you (speak|know|understand) "
            "(German|French|Spanish|Chinese|English|Italian|Japanese|Russian)?",
            "Can you (speak|answer in|talk in) (German|French|Spanish|Chinese|Italian|Japanese|Russian)?",
        ),
    ),
    (
        "Yes. I run on your own machine, and no data leaves it.",
        (
            "(Do you|Does it|Does the server) (need|use) (the internet|a network|a cloud|the cloud)?",
            "(Is|Does) (my data|this chat|the data) (safe|private|stay here|stay on my machine)?",
            "(Can I|Can you) (use you|work|run) offline?",
            "(Does|Will) my data leave (my machine|this machine|my computer)?",
        ),
    ),
)

THOUGHT = "A question about runtime or me. I know this."


def fact(rng: random.Random) -> Exchange:
    """Ask about one fact in one of its wordings."""
    answer, patterns = rng.choice(FACTS)
    question = expand(rng.choice(patterns), rng)
    return ask("facts", plain(question), vary(question, rng), answer, thought=THOUGHT)
