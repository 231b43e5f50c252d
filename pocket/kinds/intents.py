"""What the known tools do: their names, parameters, questions and results."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pocket.kinds.intent import Intent, Param
from pocket.kinds.results import Values, amount, done, expression, found, local_time, value, weather
from pocket.words import (
    CITIES,
    CURRENCIES,
    FOODS,
    LANGUAGES,
    NAMES,
    ROOMS,
    SONGS,
    STOCKS,
    THINGS,
    TOPICS,
    ZONES,
    some_word,
)

_CITY = Param(
    ("city", "city", "location", "place", "town"),
    "string",
    ("The city.", "Name of the city.", "City name, such as Paris."),
)
_TEXT = Param(("text", "content", "message", "body"), "string", ("The text.", "What to write."))


def _pick(*sources: Sequence[str]) -> Callable[[random.Random], Values]:
    def values(rng: random.Random) -> Values:
        return [rng.choice(source) for source in sources]

    return values


def _two(low: int, high: int) -> Callable[[random.Random], Values]:
    def values(rng: random.Random) -> Values:
        top = rng.choice((high, high, high * 10))
        return [rng.randint(low, top), rng.randint(low, top)]

    return values


def _sum_text(rng: random.Random) -> Values:
    return [f"{rng.randint(0, 99)} {rng.choice('+-*')} {rng.randint(0, 99)}"]


def _mail(rng: random.Random) -> Values:
    to = rng.choice((rng.choice(NAMES), f"{rng.choice(NAMES).lower()}@example.com"))
    return [
        to,
        rng.choice(
            (
                "Hello",
                "Lunch",
                "The plan",
                "News",
                "Invoice",
                f"The {rng.choice(THINGS)}",
                "See you soon",
                "Meeting",
            )
        ),
    ]


_NUMBER_PAIR = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))
_A = Param(("a", "x", "first", "num1"), "integer", ("First number.", "The first one."))
_B = Param(("b", "y", "second", "num2"), "integer", ("Second number.", "The second one."))

INTENTS: tuple[Intent, ...] = (
    Intent(
        "weather",
        "world",
        ("get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather", "weather_lookup"),
        (
            "Get the weather of a city.",
            "Current weather for a place.",
            "Look up the weather.",
            "Get the current weather in a given location",
        ),
        (_CITY,),
        (
            "(What is|What's|How is|Tell me) the (current |)weather( like|) in {0}( today| now| right "
            "now|)(?|)",
            "(Is it|Will it be) (sunny|cold|warm|raining|rainy) in {0}( today|)?",
            "(Weather|The weather) in {0}(?|, please.|)",
            "(How warm|How cold|How hot) is it in {0}( now| today|)?",
            "(What is|What's) the temperature in {0}( now|)?",
            "Do I need an umbrella in {0}( today|)?",
        ),
        _pick(CITIES),
        weather,
        "(What is|How is) the weather in {a} and in {b}?",
    ),
    Intent(
        "weather",
        "world",
        ("get_weather", "get_current_weather"),
        ("Get the weather of a city.", "Current weather for a place."),
        (_CITY, Param(("unit", "units"), "string", ("celsius or fahrenheit", "Unit of the temperature."))),
        (
            "(What is|What's|How is|Tell me) the weather( like|) in {0} in {1}?",
            "(How warm|How cold) is it in {0}, in {1}?",
        ),
        _pick(CITIES, ("celsius", "fahrenheit")),
        weather,
    ),
    Intent(
        "time",
        "world",
        ("get_time", "get_current_time", "current_time", "time_now"),
        ("Get the time in a time zone.", "Current time for a zone."),
        (Param(("timezone", "zone", "tz"), "string", ("Time zone, such as Europe/Paris.", "The zone.")),),
        ("(What time is it|What is the time|Tell me the time|What's the time|The time) (now |)in {0}(?|)",),
        _pick(ZONES),
        local_time,
        "What time is it in {a} and in {b}?",
    ),
    Intent(
        "time",
        "world",
        ("get_time", "get_local_time", "clock"),
        ("Get the time in a city.", "Local time of a place."),
        (_CITY,),
        ("(What time is it|What is the time|Tell me the time|How late is it) (now |)in {0}(?|)",),
        _pick(CITIES),
        local_time,
        "What time is it in {a} and in {b}?",
    ),
    Intent(
        "math",
        "math",
        ("add", "add_numbers", "sum", "plus"),
        ("Add two numbers.", "Sum of two numbers.", "Adds a and b."),
        (_A, _B),
        (
            "(What is|What's|How much is|Compute|Calculate) {0} (+|plus) {1}(?|)",
            "(Add|Please add|Sum) {0} and {1}(.|)",
            "(Use the tool to|Please) (add|sum) {0} and {1}(.|)",
        ),
        _two(0, 99),
        value("+"),
    ),
    Intent(
        "math",
        "math",
        ("subtract", "minus"),
        ("Subtract b from a.", "Difference of two numbers."),
        (_A, _B),
        ("(What is|What's|How much is|Compute|Calculate) {0} (-|minus) {1}(?|)",),
        _two(0, 99),
        value("-"),
    ),
    Intent(
        "math",
        "math",
        ("multiply", "times", "product"),
        ("Multiply two numbers.", "Product of two numbers."),
        (_A, _B),
        (
            "(What is|What's|How much is|Compute|Calculate) {0} (*|times) {1}(?|)",
            "(Multiply|Please multiply) {0} (and|by) {1}(.|)",
        ),
        _two(0, 99),
        value("*"),
    ),
    Intent(
        "math",
        "math",
        ("calculator", "calculate", "evaluate", "compute"),
        ("Evaluate an arithmetic expression.", "A calculator."),
        (Param(("expression", "expr", "formula", "input"), "string", ("The expression.", "Such as 1 + 2.")),),
        (
            "(What is|What's|How much is|Compute|Calculate|Work out) {0}(?|)",
            "(Use the calculator|Calculate this|Please compute): {0}",
        ),
        _sum_text,
        expression,
    ),
    Intent(
        "search",
        "world",
        ("search", "web_search", "search_web", "find", "google"),
        ("Search the web.", "Find pages on a subject.", "Web search."),
        (Param(("query", "q", "text", "terms"), "string", ("What to search for.", "The search query.")),),
        (
            "(Search|Look|Please search) (|the web )for {0}(.|)",
            "(Find|Look up|Search) (|something about |information on ){0}(.|)",
            "(Google|Can you search for|Can you look up) {0}(?|)",
        ),
        lambda rng: [
            rng.choice(TOPICS)
            if rng.random() < 0.4
            else " ".join(some_word(rng) for _ in range(rng.randint(1, 3)))
        ],
        found,
    ),
    Intent(
        "email",
        "post",
        ("send_email", "send_mail", "email", "mail"),
        ("Send an email.", "Write a mail to somebody."),
        (
            Param(("to", "recipient", "address"), "string", ("Who gets it.", "The recipient.")),
            Param(("subject", "title"), "string", ("The subject line.",)),
        ),
        (
            "(Send|Write|Please send) (an email|a mail|an e-mail) to {0} (with the subject|about|with "
            "subject) {1}(.|)",
            "(Email|Mail) {0} (about|with the subject) {1}(.|)",
        ),
        _mail,
        done("I sent the email to {0}."),
    ),
    Intent(
        "message",
        "post",
        ("send_message", "send_sms", "text_message", "message"),
        ("Send a message to somebody.", "Send a text message."),
        (Param(("to", "recipient", "name", "person"), "string", ("Who gets it.",)), _TEXT),
        ("(Send|Write) {0} (a message|the message|a text)(:| saying) {1}", "(Tell|Text|Message) {0}: {1}"),
        lambda rng: [
            rng.choice(NAMES),
            rng.choice(
                (
                    "I am late",
                    "call me",
                    "see you soon",
                    "dinner is ready",
                    "happy birthday",
                    f"buy {rng.choice(FOODS)}",
                    f"bring the {rng.choice(THINGS)}",
                )
            ),
        ],
        done("I told {0}."),
    ),
    Intent(
        "timer",
        "clock",
        ("set_timer", "start_timer", "timer"),
        ("Start a timer.", "Set a timer in minutes."),
        (Param(("minutes", "duration", "mins"), "integer", ("Length in minutes.",)),),
        (
            "(Set|Start|Please set) a timer (for|of) {0} minutes(.|)",
            "(Wake me|Remind me|Ring) in {0} minutes(.|)",
            "Timer(:| for) {0} minutes",
        ),
        lambda rng: [rng.randint(2, 90)],
        done("The timer runs for {0} minutes."),
    ),
    Intent(
        "alarm",
        "clock",
        ("set_alarm", "create_alarm", "alarm"),
        ("Set an alarm.", "Wake the user at a time."),
        (Param(("time", "at", "hour"), "string", ("Time, such as 07:30.",)),),
        ("(Set|Please set|Create) an alarm (for|at) {0}(.|)", "Wake me( up|) at {0}(.|)"),
        lambda rng: [f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45, 10, 20)):02d}"],
        done("The alarm is set for {0}."),
    ),
    Intent(
        "translate",
        "world",
        ("translate", "translate_text", "translator"),
        ("Translate a text.", "Translate into a language."),
        (
            Param(("text", "phrase", "input"), "string", ("The text.",)),
            Param(("language", "target", "to"), "string", ("The language to translate to.",)),
        ),
        ("(Translate|Please translate) {0} (into|to) {1}(.|)", "(How do you say|What is) {0} in {1}?"),
        lambda rng: [
            f"{rng.choice(('the', 'a', 'my'))} {some_word(rng)}" if rng.random() < 0.5 else some_word(rng),
            rng.choice(LANGUAGES),
        ],
        found,
    ),
    Intent(
        "stock",
        "world",
        ("get_stock_price", "stock_price", "get_quote"),
        ("Get the price of a stock.", "Stock quote."),
        (Param(("symbol", "ticker", "stock"), "string", ("Ticker, such as AAPL.",)),),
        (
            "(What is|What's|Tell me) the (stock |share |)price of {0}(?|)",
            "(How much is|How is) {0} (stock|trading)(?| now?| today?)",
        ),
        _pick(STOCKS),
        amount("price", "{0} is at {r}."),
    ),
    Intent(
        "currency",
        "math",
        ("convert_currency", "exchange", "convert"),
        ("Convert money.", "Convert an amount into another currency."),
        (
            Param(("amount", "value"), "number", ("How much.",)),
            Param(("from_currency", "from", "source"), "string", ("",)),
            Param(("to_currency", "to", "target"), "string", ("",)),
        ),
        ("(Convert|Change|Exchange) {0} {1} (to|into) {2}(.|)", "(How much|What) is {0} {1} in {2}?"),
        lambda rng: [rng.randint(1, 500), *rng.sample(CURRENCIES, 2)],
        amount("result", "{0} {1} are {r} {2}."),
    ),
    Intent(
        "music",
        "home",
        ("play_music", "play_song", "play"),
        ("Play a song.", "Start music."),
        (Param(("song", "title", "track"), "string", ("Name of the song.",)),),
        ("(Play|Please play|Start|Put on) (|the song ){0}(.|)", "I want to hear {0}(.|)"),
        lambda rng: [rng.choice(SONGS) if rng.random() < 0.5 else some_word(rng).capitalize()],
        done("Playing {0}."),
    ),
    Intent(
        "note",
        "post",
        ("create_note", "add_note", "save_note"),
        ("Write a note.", "Save a note."),
        (_TEXT,),
        (
            "(Make|Create|Write|Save|Add) a note(:| saying| that says) {0}",
            "(Note|Remember this|Write down): {0}",
        ),
        lambda rng: [
            f"{rng.choice(('buy', 'find', 'clean', 'sell', 'bring'))} {rng.choice(('the', 'some', 'more'))} "
            f"{some_word(rng)}"
        ],
        done("I saved the note."),
    ),
    Intent(
        "light",
        "home",
        ("turn_on_light", "light_on", "switch_light"),
        ("Turn on the light in a room.", "Light switch."),
        (Param(("room", "place", "where"), "string", ("The room.",)),),
        (
            "(Turn on|Switch on|Please turn on) the light(s|) in the {0}(.|)",
            "(Light|Lights) on in the {0}(.|!|)",
            "Make it bright in the {0}(.|)",
        ),
        _pick(ROOMS),
        done("The light in the {0} is on."),
    ),
    Intent(
        "file",
        "disk",
        ("read_file", "open_file", "load_file", "cat"),
        ("Read a file.", "Get the content of a file."),
        (Param(("path", "file", "filename", "name"), "string", ("Path of the file.",)),),
        ("(Read|Open|Show me|Load) (|the file ){0}(.|)", "What (is in|does the file contain:) {0}?"),
        lambda rng: [f"{some_word(rng)}.{rng.choice(('txt', 'json', 'py', 'md', 'csv'))}"],
        found,
    ),
    Intent(
        "random",
        "math",
        ("random_number", "roll", "rand"),
        ("Pick a random number.", "Random whole number."),
        (
            Param(("min", "low", "start"), "integer", ("Lowest.",)),
            Param(("max", "high", "end"), "integer", ("Highest.",)),
        ),
        ("(Give me|Pick|Choose|Roll) a random number (between|from) {0} (and|to) {1}(.|)",),
        lambda rng: [rng.randint(0, 20), rng.randint(21, 999)],
        amount("number", "The number is {r}."),
    ),
    Intent(
        "population",
        "world",
        ("get_population", "population", "count_people"),
        ("Population of a city.", "How many people live in a place."),
        (_CITY,),
        ("How many people live in {0}?", "(What is|What's|Tell me) the population of {0}(?|)"),
        _pick(CITIES),
        amount("population", "{r} people live in {0}."),
    ),
)
