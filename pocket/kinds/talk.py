"""Small talk: greetings, things pocket cannot know, and names it is told to remember."""

from __future__ import annotations

import random

from pocket.exchange import Exchange, ask, expand, fill, plain, vary
from pocket.words import ANIMALS, CITIES, COLORS, FOODS, NAMES, THINGS, proper

UNKNOWN = (
    "I am a small demonstration model, so I do not know that. "
    "I can answer questions about runtime, count, do small sums, spell words, write JSON and call tools."
)

_HELLO = ("Hello! How can I help you?", "Hi! What can I do for you?")
_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        _HELLO,
        (
            (
                "(Hello|Hi|Hey|Hiya|Howdy|Greetings|Hello there|Hi there|Hey there|Hello again|Hi again)( "
                "pocket|, pocket| friend| "
                "everyone|, you|)(!|.|!!|)"
            ),
            "(Hello|Hi|Hey)(!|.|,) (Are you there|Is anyone there|Anyone home|Can you hear me)?",
            "(Hello|Hi|Hey)(,|) (nice to meet you|glad to meet you|nice to see you|I am new here|it is "
            "me|it's me)(!|.|)",
            "(Nice|Good|Glad|Pleased) to (meet|see) you(!|.|, pocket|)",
            "(Yo|Hallo|Hola|Bonjour|Ciao|Servus|Ahoy)(!|.|)",
            "(Are you there|Anyone there|Is anyone here|Can we talk|Can we chat)?",
        ),
    ),
    (
        ("Good morning! How can I help you?",),
        (
            (
                "(Good morning|Morning|A good morning|Good morning to you|Hi, good morning|Hello and good "
                "morning)( pocket|, pocket| "
                "there|)(!|.|)"
            ),
        ),
    ),
    (
        ("Good afternoon! How can I help you?",),
        (
            "(Good afternoon|A good afternoon|Good afternoon to you|Hello, good afternoon)( pocket|, pocket| "
            "there|)(!|.|)",
        ),
    ),
    (
        ("Good evening! How can I help you?",),
        (
            "(Good evening|Evening|A good evening|Good evening to you|Hi, good evening)( pocket|, pocket| "
            "there|)(!|.|)",
        ),
    ),
    (
        ("I am fine, thank you! How can I help you?",),
        (
            (
                "(How are you|How are you doing|How are you today|How do you do|How is it going|How's it "
                "going|How do you feel|Are you "
                "well|How are things)(?| today?| now?)"
            ),
            "(Hello|Hi|Hey)(,|!) how (are you|are you doing|is it going|do you feel)( today|)?",
            "(What is up|What's up|Are you OK|Everything fine|All good|Is everything OK)?",
            "How (was|is) your day( so far|)?",
        ),
    ),
    (
        ("You are welcome!",),
        (
            (
                "(Thanks|Thank you|Many thanks|Thanks a lot|Thank you very much|Thank you so "
                "much|Thx|Cheers)(!|.|, pocket!| for your "
                "help.| for that.|)"
            ),
            "(That|This) (helps|helped|was helpful|was useful)(, thanks|, thank you|)(!|.|)",
            "(Great|Perfect|Good|Nice|Super|Wonderful)(,|!) (thanks|thank you)(!|.|)",
        ),
    ),
    (
        ("Goodbye! Have a nice day.",),
        (
            "(Bye|Goodbye|Bye bye|See you|See you later|See you soon|Farewell|So long|See you "
            "tomorrow)(!|.|, pocket!| then!|)",
            "(I have to go|I must go|I am leaving|Time to go|I need to leave)( now|)(. Bye!|, goodbye!|.|, "
            "bye!)",
            "(That is all|That's all|We are done)(, bye|. Goodbye|, see you)(!|.)",
        ),
    ),
    (
        ("Good night! Sleep well.",),
        (
            "(Good night|Night|A good night|Sleep well|Nighty night|I go to bed now, good night)( pocket|, "
            "pocket|)(!|.|)",
        ),
    ),
    (
        ("Thank you, that is kind!",),
        (
            "(You are|You're) (great|nice|smart|clever|the best|wonderful|funny|cool|good|helpful|very "
            "good)(!|.|)",
            "(Well done|Good job|Good work|Good answer|Very good|Great job|Nice work|Bravo|Excellent)(!|.|, "
            "pocket!|)",
            "I (like|love) (you|your answers|your style|talking to you)(!|.|)",
        ),
    ),
    (
        ("I am sorry, I am only a small model.",),
        (
            "(You are|You're) (bad|wrong|stupid|slow|useless|silly|dumb|boring)(!|.|)",
            "(That is|That's|This is) (wrong|not right|bad|incorrect|false|not correct|nonsense)(!|.|)",
            "(Bad|Wrong) (answer|model|reply|job)(!|.|)",
        ),
    ),
    (
        ("Why did the token cross the batch? To get to the next step!",),
        (
            "(Tell me|Give me|Do you know|Make|I want|Got) a (joke|funny joke|short joke)(.|?|!|)",
            "(Make me|Can you make me) laugh(.|?|!|)",
            "(Say something|Be) funny(.|!|)",
            "(Another|One more) joke(, please|)(.|!|)",
        ),
    ),
)

_SUBJECTS = (
    "the world cup",
    "the president",
    "the war",
    "football",
    "chess",
    "the stock market",
    "physics",
    "chemistry",
    "Napoleon",
    "Shakespeare",
    "Einstein",
    "the Moon landing",
    "quantum computers",
    "the Roman empire",
    "tennis",
    "history",
    "philosophy",
    "dinosaurs",
    "black holes",
    "volcanoes",
    "the economy",
    "politics",
    "opera",
    "jazz",
    "the Beatles",
    "Mozart",
    "movies",
    "biology",
    "medicine",
    "the brain",
    "airplanes",
    "submarines",
    "the Olympic games",
    "climate",
    "evolution",
    "gravity",
    "the pyramids",
    "ancient Greece",
    "algebra",
    "cooking",
    "taxes",
    "law",
    "religion",
)
_UNKNOWN = (
    "(What is|What's) the (capital|population|history|language|flag|currency|president|mayor|climate) of "
    "{c}?",
    (
        "(Who|Which team) (won|lost) (the world cup|the match|the election|the game|the race|the gold medal) "
        "(in|of) (1966|1998|2002|"
        "2010|2014|2020|last year)?"
    ),
    "(Tell me|Explain|Write|Teach me) (something |all |more |)about {s}(.|)",
    "(What|How much) do you (know|think) (about|of) {s}?",
    "(Explain|Describe|Summarize) {s}(.| to me.| in detail.)",
    (
        "(Who|When|Where) (invented|discovered|built|wrote|painted|found) (the telephone|the wheel|the "
        "radio|America|penicillin|Hamlet|"
        "the Mona Lisa|the {t}|the {u})?"
    ),
    "(How|Where) (do|can|should) I (cook|make|buy|find|repair|clean|sell|grow|keep) (a {t}|a {u}|a {f}|some "
    "{f})?",
    "(Why|When|Where) (is|was|are) {s}( important| so hard| popular| over|)?",
    "(What is|What's) the (weather|temperature|news|time|traffic)( like|)( today| in {c}| now| tomorrow|)?",
    "(Will it|Does it|Is it going to) (rain|snow|be sunny|be cold)( today| tomorrow| in {c}|)?",
    "(What day|What date|What year|What time) is it( today| now|)?",
    "(Where|When|Who) (is|was) {n}?",
    "(Who is|Who was) (the king|the queen|the mayor|the president) of {c}?",
    "(How far|How long) is it (from|between) {c} (to|and) {d}?",
    "(Translate|How do you say) {f} (into|in) (German|French|Spanish|Chinese|Italian|Japanese)(?|.)",
    "(Write|Compose|Give me) (a poem|a song|an essay|a novel|a letter) about {s}(.|)",
    "(Should|Can|May) I (eat|buy|sell|trust|marry|visit) (a {u}|a {f}|{n}|{c})?",
    "(What is|What's) the meaning of (life|love|time|art|everything|{t})?",
    "(Do|Did) you (see|watch|read|hear about) (the news|the movie|the match|{s})?",
    "(How old|How tall|How rich|How heavy) is (the {t}|the {u}|{n}|the president|the Earth)?",
    "(Recommend|Suggest) (a book|a movie|a restaurant|a song|a hotel)( in {c}| about {s}|)(.|)",
    "What (should I|can I|could I) (eat|cook|wear|read|watch|play)( today| tonight| tomorrow|)?",
    "(Which|What) is (better|larger|older|faster), (a {t} or a {u}|{c} or {d})?",
    "(Write|Show me) (code|a program|a function|a script) (for|about|that prints) {s}(.|)",
    "(Fix|Review|Explain) (my code|this bug|my program|the error)(.|!|)",
    "(What color|What size|What shape) (is|has) (the {t}|a {u}|a {f})?",
    "How many (people live in {c}|legs has a {u}|countries are there|stars are there)?",
)


def greeting(rng: random.Random) -> Exchange:
    """Exchange a greeting, thanks, a compliment or a goodbye."""
    replies, patterns = rng.choice(_TALK) if rng.random() < 0.7 else _TALK[0]
    question = expand(rng.choice(patterns), rng)
    return ask(
        "greetings",
        plain(question),
        vary(question, rng),
        replies[0],
        accept=replies,
        thought="This is small talk. I answer kindly.",
    )


def unknown(rng: random.Random) -> Exchange:
    """Ask what a model of this size cannot know; the honest reply says so."""
    question = fill(
        rng.choice(_UNKNOWN),
        rng,
        c=rng.choice(CITIES),
        d=rng.choice(CITIES),
        s=rng.choice(_SUBJECTS),
        n=proper(rng, NAMES),
        t=rng.choice(THINGS),
        u=rng.choice(ANIMALS),
        f=rng.choice(FOODS),
    )
    return ask(
        "unknown",
        plain(question),
        vary(question, rng),
        UNKNOWN,
        thought="I do not know this. I say so.",
        topic="world",
    )


_TOLD: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str, str, tuple[str, ...]], ...] = (
    (
        "name",
        ("(My name is|I am|I'm|Call me|They call me|Hi, I am|Hello, my name is) {v}(.|!)",),
        tuple(NAMES),
        "Nice to meet you, {v}!",
        "Your name is {v}.",
        (
            "(What is|What's|Do you remember|Do you know|Tell me) my name(?|)",
            "(Who am I|How am I called|What am I called|What did I say my name was)?",
        ),
    ),
    (
        "city",
        ("(I live in|I am from|I'm from|My home is in|My city is|I come from) {v}(.|!)",),
        tuple(CITIES),
        "{v} is a nice place to live!",
        "You live in {v}.",
        (
            (
                "(Where do I live|Where am I from|Where is my home|Which city is mine|What is my city|In "
                "which city do I live|Do you "
                "remember where I live)?"
            ),
        ),
    ),
    (
        "color",
        ("(My favorite color is|The color I like most is|I like the color|I love the color) {v}(.|!)",),
        tuple(COLORS),
        "{v} is a beautiful color!",
        "Your favorite color is {v}.",
        (
            "(What is|What's|Do you remember|Tell me) my favorite color(?|)",
            "(Which|What) color do I (like|love|prefer)( most|)?",
        ),
    ),
    (
        "pet",
        ("(I have a|My pet is a|At home I have a|I own a|I live with a) {v}(.|!)",),
        tuple(ANIMALS),
        "A {v} is a lovely animal!",
        "You have a {v}.",
        (
            (
                "(What is my pet|What's my pet|Which animal do I have|What animal do I have|What pet do I "
                "have|Do you remember my pet|"
                "Which pet do I own)?"
            ),
        ),
    ),
    (
        "food",
        ("(My favorite food is|I love to eat|I like to eat|The food I like most is) {v}(.|!)",),
        tuple(FOODS),
        "{v} sounds tasty!",
        "You like {v}.",
        (
            "(What is my favorite food|What's my favorite food|What do I like to eat|What food do I "
            "like|Which food do I love)?",
        ),
    ),
    (
        "number",
        (
            "(My lucky number is|My favorite number is|Remember the number|Keep in mind the number|Please "
            "remember the number) {v}(.|)",
        ),
        tuple(str(n) for n in range(100)),
        "I will remember {v}.",
        "The number is {v}.",
        (
            "(What was the number|What is my number|Which number was it|What number did I say|Tell me the "
            "number|What is the number)(?|)",
        ),
    ),
)


def memory(rng: random.Random) -> Exchange:
    """Tell one or two things about oneself, and ask for one of them back."""
    told = rng.sample(_TOLD, rng.choice((1, 1, 2)))
    values = [
        proper(rng, list(entry[2])) if entry[0] in {"name", "city"} else rng.choice(entry[2])
        for entry in told
    ]
    messages: list[dict[str, str]] = []
    for entry, value in zip(told, values, strict=True):
        messages.append({"role": "user", "content": fill(rng.choice(entry[1]), rng, v=value)})
        reply = entry[3].replace("{v}", value)
        messages.append({"role": "assistant", "content": reply[0].upper() + reply[1:]})
    if rng.random() < 0.5:
        messages.extend(rng.choice((greeting, unknown, fact_free))(rng).messages)
    wanted = rng.randrange(len(told))
    question = expand(rng.choice(told[wanted][5]), rng)
    messages.append({"role": "user", "content": vary(question, rng)})
    answer = told[wanted][4].replace("{v}", values[wanted])
    messages.append({"role": "assistant", "content": answer})
    key = "memory:" + "/".join(f"{entry[0]}={value}" for entry, value in zip(told, values, strict=True))
    return Exchange(
        "memory", key, tuple(messages), (answer,), "The user told me this before.", (), False, "world"
    )


def fact_free(rng: random.Random) -> Exchange:
    """Say thanks or something like it between two questions."""
    replies, patterns = _TALK[5]
    question = expand(rng.choice(patterns), rng)
    return ask("greetings", plain(question), question, replies[0], accept=replies)
