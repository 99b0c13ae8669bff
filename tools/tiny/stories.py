"""Short stories in plain English from a grammar of scenes; every story keeps its people, things and places straight."""
from words import ADJECTIVES, ANIMALS, COLORS, FOODS, NAMES, OBJECTS, PLACES, WEATHER, article, pronoun

OPENINGS = [
    "Once upon a time there was {a_hero} who lived near {a_place}.",
    "One {weather} morning {hero} walked to the {place}.",
    "Long ago, in a quiet valley, {a_hero} lived close to {a_place}.",
    "{Hero} woke up early because it was a {weather} day.",
    "There was once {a_hero} who loved the {place} more than any other spot.",
    "On a {weather} afternoon {hero} sat by the {place} and listened to the wind.",
]
FINDS = [
    "There {they} found {a_thing} lying on the ground.",
    "Behind a bush {they} saw {a_thing}, and it looked very old.",
    "In {their} bag {they} carried {a_thing} that belonged to {friend}.",
    "Under a flat stone {they} discovered {a_thing}.",
    "Near the door of the {place} stood {a_thing}.",
]
TROUBLES = [
    "But the {thing} was broken, and nobody knew how to fix it.",
    "But then a strong wind came and carried the {thing} away.",
    "But a {animal} took the {thing} and ran into the forest.",
    "But {friend} had lost the {thing} there the week before and missed it very much.",
    "But it began to rain, and the path home was soon under water.",
    "But the {thing} was too heavy to carry alone.",
]
THOUGHTS = [
    "\"I must not give up,\" {they} said.",
    "\"What should I do now?\" {they} asked quietly.",
    "{Hero} thought about it for a long time.",
    "\"Perhaps {friend} can help me,\" {they} thought.",
    "{Hero} was sad, but only for a moment.",
    "{Hero} took a deep breath and counted to ten.",
]
HELP = [
    "So {they} went to see {friend}, who lived in the next village.",
    "Then {friend} came along the road with a basket of {food}.",
    "A friendly {animal} showed {them} the way.",
    "{Friend} heard the story and promised to help.",
    "{Hero} asked an old {animal} for advice, and it told {them} to be patient.",
]
WORK = [
    "Together they worked until the sun went down.",
    "They looked behind every tree and under every stone.",
    "Step by step they found a way to put things right.",
    "They shared some {food} and made a plan.",
    "It took them three days, but they did not stop.",
    "They followed the river to the {place} and back again.",
]
ENDINGS = [
    "In the end the {thing} was safe, and {hero} went home happy.",
    "That evening everyone ate {food} and laughed about the adventure.",
    "From that day on, {hero} and {friend} were the best of friends.",
    "{Hero} smiled, because a good friend is better than any {thing}.",
    "And every year they met at the {place} to tell the story again.",
    "{Hero} learned that asking for help is a kind of courage.",
]


def cast(rng):
    """Who and what a story is about: chosen once, so that a request can name them."""
    hero, friend = rng.sample(NAMES, 2)
    adjective, place = rng.choice(ADJECTIVES), rng.choice(PLACES)
    return {"hero": hero, "friend": friend, "place": place, "thing": f"{rng.choice(COLORS)} {rng.choice(OBJECTS)}",
            "animal": rng.choice(list(ANIMALS)), "food": rng.choice(FOODS), "weather": rng.choice(WEATHER),
            "a_place": article(f"{adjective} {place}")}


def story(rng, who, sentences=None):
    """A story of five to nine sentences about the cast."""
    they, their, them = pronoun(who["hero"])
    kind = "girl" if they == "she" else "boy"
    fields = dict(who, they=they, their=their, them=them, Hero=who["hero"], Friend=who["friend"],
                  a_hero=f"a {kind} called {who['hero']}", a_thing=article(who["thing"]))
    parts = [rng.choice(OPENINGS), rng.choice(FINDS), rng.choice(TROUBLES)]
    parts += rng.sample(THOUGHTS, rng.choice((1, 1, 2)))
    parts += rng.sample(HELP, rng.choice((0, 1, 1)))
    parts += rng.sample(WORK, rng.choice((1, 2)))
    parts += rng.sample(ENDINGS, rng.choice((1, 2)))
    text = [p.format(**fields) for p in parts]
    text = [t[0].upper() + t[1:] for t in text]
    return " ".join(text[:sentences])


FILLER = [
    "The {adjective} {place} was {weather} that day.",
    "{name} carried {a_thing} across the {place}.",
    "A {animal} slept beside the {adjective} {place}.",
    "{name} and {other} ate {food} near the {place}.",
    "In the {adjective} {place} there was {a_thing}.",
    "Nobody in the {place} had seen the {animal} before.",
    "{name} likes {food}, but {other} likes {food2} more.",
    "The road from the {place} to the {place2} is long.",
    "{name} told {other} about the {adjective} {place}.",
    "It was {weather}, so {name} stayed in the {place}.",
    "Every morning the {animal} walked past the {place}.",
    "{name} painted the {place} in {color} and {color2}.",
]


def filler(rng):
    """One sentence of haystack."""
    name, other = rng.sample(NAMES, 2)
    place, place2 = rng.sample(PLACES, 2)
    food, food2 = rng.sample(FOODS, 2)
    color, color2 = rng.sample(COLORS, 2)
    return rng.choice(FILLER).format(
        name=name, other=other, place=place, place2=place2, food=food, food2=food2, color=color, color2=color2,
        adjective=rng.choice(ADJECTIVES), weather=rng.choice(WEATHER), animal=rng.choice(list(ANIMALS)),
        a_thing=article(f"{color} {rng.choice(OBJECTS)}"))
