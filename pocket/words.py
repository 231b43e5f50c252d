"""Word lists that the generators draw from."""

from __future__ import annotations

import random

NAMES = """Anna Tom Mia Ben Lena Paul Emma Noah Sara Leon Ivan Olga Juan Rosa Kofi Amina Yuki Hana Wei Ling
Omar Leila Raj Priya Lars Freya Nils Greta Marco Giulia Pierre Chloe Hugo Alice Bob Carol Dave Eve Frank
Grace Henry Irene Jack Kate Liam Maria Nora Oscar Petra Quinn Ruth Sam Tina Uma Victor Wendy Xavier Yara Zoe
Adam Bella Clara David Elena Felix Gina Hans Ida Jonas Karl Laura Max Nina Otto Peter Rita Simon Theo Ursula
Vera Walter""".split()

CITIES = """Paris London Berlin Madrid Rome Vienna Prague Oslo Stockholm Helsinki Copenhagen Amsterdam
Brussels Lisbon Athens Dublin Warsaw Budapest Zurich Geneva Munich Hamburg Milan Naples Seville Porto Tokyo
Kyoto Osaka Seoul Beijing Shanghai Shenzhen Singapore Bangkok Hanoi Jakarta Manila Delhi Mumbai Cairo Lagos
Nairobi Accra Tunis Sydney Melbourne Perth Auckland Toronto Montreal Vancouver Boston Chicago Denver Dallas
Seattle Miami Lima Quito Bogota Santiago Havana Istanbul Ankara Dubai Doha Riga Tallinn Vilnius Sofia
Zagreb""".split()

COLORS = "red green blue yellow orange purple pink brown black white gray silver gold violet".split()

ANIMALS = """cat dog horse cow sheep goat pig duck goose hen fox wolf bear lion tiger mouse rat rabbit deer
owl eagle crow swan frog toad snake lizard turtle fish shark whale dolphin seal otter beaver badger hedgehog
squirrel monkey camel zebra giraffe elephant panda koala kangaroo penguin parrot pigeon sparrow spider ant
bee butterfly snail worm crab lobster donkey buffalo cheetah falcon salmon""".split()

FOODS = """apple pear plum cherry grape melon lemon lime peach banana mango fig date olive carrot potato
tomato onion garlic pepper bean pea corn rice bread cheese butter milk egg soup salad pasta pizza cake
cookie honey jam tea coffee juice water sugar salt cabbage spinach radish pumpkin walnut almond raisin
biscuit pancake waffle yogurt noodle""".split()

THINGS = """table chair lamp door window floor wall roof house garden tree flower grass river lake ocean
island mountain valley forest desert bridge road street train plane boat ship car truck bicycle wheel engine
hammer nail saw rope ladder bucket basket bottle glass cup plate spoon fork knife pan oven clock watch phone
radio camera computer keyboard screen printer paper pencil pen book letter stamp box bag coat shirt dress
shoe sock hat glove scarf ring key lock coin candle mirror pillow blanket carpet curtain guitar piano violin
drum flute ball kite puzzle doll robot rocket planet star moon sun cloud rain snow wind storm thunder
lightning rainbow shadow stone sand metal iron copper silver diamond crystal marble brick wood cotton
leather rubber plastic button zipper pocket wallet ticket castle palace temple tower market bakery library
museum hospital station airport harbor village""".split()

QUALITIES = """happy sad quick slow bright dark warm cold heavy light small large tall short round square
soft hard loud quiet clean dirty empty full early late young old brave gentle clever simple strange famous
modern ancient smooth rough sweet bitter sour fresh sharp narrow wide deep shallow honest friendly curious
careful silent golden purple yellow orange seven eleven twelve thirteen twenty thirty hundred""".split()

DEEDS = """walk jump swim climb dance sing laugh cry think learn teach write read draw paint build break
carry throw catch push pull open close begin finish follow listen answer whisper travel wander gather
scatter polish repair invent discover remember forget believe imagine borrow return promise explain measure
compare deliver collect protect celebrate juggle wobble tumble shiver glitter rattle mumble""".split()

TECHNICAL = """runtime server token model python hello world pocket prompt batch cache request answer page
prefix client stream memory port tool call object number letter name city color yes no please thanks stop
start test example""".split()

SPELLED = sorted(set(ANIMALS + FOODS + THINGS + QUALITIES + DEEDS + TECHNICAL))

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k kn l m n p ph pl pr qu r s sc sh sk sl sm sn sp st "
    "str sw t th tr tw v w wh y z"
).split()
_VOWELS = "a e i o u ai ea ee ie oa oo ou ei au y".split()
_CODAS = [
    "",
    "",
    "",
    "b",
    "ck",
    "d",
    "ff",
    "g",
    "l",
    "ll",
    "m",
    "mp",
    "n",
    "nd",
    "ng",
    "nk",
    "nt",
    "p",
    "r",
    "rd",
    "rn",
    "s",
    "ss",
    "sh",
    "st",
    "t",
    "tch",
    "th",
    "x",
    "ve",
    "ble",
    "er",
    "le",
    "ing",
    "ed",
    "en",
    "on",
]

PHRASES = """hello world|good morning|open the door|the sky is blue|I like tea|stop here|one two three
all is well|see you later|time to go|knock knock|the end|cats and dogs|rain is coming|we are ready
never give up|ready, set, go
the train is late|keep it simple|thank you very much|good night, moon|this is a test
testing, testing|start now
left and right|up and down|bread and butter|black and white|the quick fox|a slow turtle|green grass
red roses
breaking news|happy birthday|welcome home|long live the king|look at the stars|nothing to see here""".replace(
    "\n", "|"
).split("|")

# what tools are asked for
ZONES = (
    "Europe/Paris",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Tokyo",
    "Asia/Shanghai",
    "UTC",
    "Europe/London",
    "Africa/Cairo",
    "Australia/Sydney",
    "America/Chicago",
)
TOPICS = (
    "paged attention",
    "bread recipes",
    "cheap flights",
    "the best museum",
    "train tickets",
    "solar power",
    "jazz music",
    "used cars",
    "football results",
    "the weather on Mars",
    "black holes",
    "garden tools",
)
CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CNY", "CHF")
ROOMS = ("kitchen", "bedroom", "bathroom", "garage", "office", "garden", "hall", "living room")
STOCKS = ("AAPL", "MSFT", "NVDA", "AMD", "TSLA", "IBM", "INTC", "ORCL")
SONGS = ("Blue Moon", "Yesterday", "Summertime", "Hey Jude", "Imagine", "Let It Be", "Moon River", "Waterloo")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Japanese", "Chinese", "Polish", "Dutch")


def invented(rng: random.Random) -> str:
    """Make up a word, so that spelling is learned from letters and not by heart."""
    parts = (
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 1, 2, 2, 3)))
    )
    return "".join(parts)


def proper(rng: random.Random, known: list[str]) -> str:
    """Pick a name of a list, or make one up, so that names are copied and not recalled."""
    return rng.choice(known) if rng.random() < 0.75 else invented(rng).capitalize()


def some_word(rng: random.Random) -> str:
    """Pick a word of the lists, or now and then an invented one."""
    return rng.choice(SPELLED) if rng.random() < 0.5 else invented(rng)


def phrase(rng: random.Random) -> str:
    """Make a short phrase to be repeated."""
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(PHRASES)
    if roll < 0.5:
        return " ".join(some_word(rng) for _ in range(rng.randint(1, 5)))
    if roll < 0.65:
        name, verb = rng.choice(NAMES), rng.choice(("likes", "sees", "has", "wants"))
        return f"{name} {verb} {rng.choice(FOODS + ANIMALS)}"
    if roll < 0.8:
        return f"the {rng.choice(QUALITIES)} {rng.choice(ANIMALS + THINGS)}"
    if roll < 0.9:
        return rng.choice(
            (
                some_word(rng).upper(),
                some_word(rng).capitalize(),
                "".join(rng.choice("ABCDEFGHXYZ") for _ in range(rng.randint(1, 5))),
            )
        )
    return " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(1, 6)))
