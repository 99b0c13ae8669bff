"""One user turn and its right answer, for every ability: sums, facts, stories, tools, passages, needles, lists, JSON.

Answers are a function of the question wherever the question has one answer, so that greedy decoding can be checked.
"""
from dataclasses import dataclass, field
import json
import zlib

import catalog
import stories
import words
from words import article


@dataclass
class Turn:
    user: str
    answer: str
    reasoning: str = ""
    calls: list = field(default_factory=list)  # (tool name, arguments, result)
    call_reasoning: str = ""  # said before the calls; `reasoning` then follows the results
    facts: dict = field(default_factory=dict)  # what a checker needs: value, kind


def held_out(*key):
    """True for the eighth of all sums that training never sees."""
    return zlib.crc32(repr(key).encode()) % 8 == 0


# ---- sums ------------------------------------------------------------------------------------------------------------

ADD = ["What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "Calculate {a} + {b}.", "{a} + {b} = ?",
       "How much is {a} plus {b}?", "Please add {b} to {a}.", "Find the sum of {a} and {b}."]
SUBTRACT = ["What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.",
            "{a} - {b} = ?", "How much is {a} minus {b}?", "Take {b} away from {a}.", "Find the difference of {a} and {b}."]
STORY_ADD = ["{n} has {a} {i} and gets {b} more. How many {i} does {n} have now?",
             "{n} buys {a} {i} on {d} and {b} {i} the next day. How many {i} is that?"]
STORY_SUBTRACT = ["{n} has {a} {i} and gives {b} away. How many {i} are left?",
                  "There are {a} {i} in the box. {n} takes {b}. How many {i} are left?"]


def add_steps(a, b):
    ones = a % 10 + b % 10
    steps = f"{a} + {b}: {a % 10} + {b % 10} = {ones}"
    if a < 10 and b < 10:
        return steps + "."
    tens = f"{a // 10} + {b // 10}"
    if ones > 9:
        return steps + f", write {ones - 10} carry 1. {tens} + 1 = {a // 10 + b // 10 + 1}. So {a + b}."
    return steps + f". {tens} = {a // 10 + b // 10}. So {a + b}."


def subtract_steps(a, b):
    if a < b:
        return f"{a} is less than {b}, so turn it around. " + subtract_steps(b, a) + f" With the sign {a - b}."
    steps = f"{a} - {b}: "
    if a % 10 >= b % 10:
        steps += f"{a % 10} - {b % 10} = {a % 10 - b % 10}. {a // 10} - {b // 10} = {a // 10 - b // 10}."
    else:
        steps += (f"{a % 10} is less than {b % 10}, borrow 1. {a % 10 + 10} - {b % 10} = {a % 10 + 10 - b % 10}. "
                  f"{a // 10} - 1 - {b // 10} = {a // 10 - 1 - b // 10}.")
    return steps + f" So {a - b}."


def sum_turn(rng, evaluation=False, sign=None):
    sign = sign or rng.choice("+-")
    while True:
        low = 10 if evaluation or rng.random() < 0.85 else 0
        a, b = rng.randint(low, 99), rng.randint(low, 99)
        if sign == "-" and a < b and rng.random() < 0.9:
            a, b = b, a
        if held_out(sign, a, b) == evaluation:
            break
    value = a + b if sign == "+" else a - b
    steps = add_steps(a, b) if sign == "+" else subtract_steps(a, b)
    facts = {"kind": "sum", "value": value}
    if a >= b and rng.random() < (0.15 if evaluation else 0.25):
        item, name = rng.choice(words.ITEMS), rng.choice(words.NAMES)
        asked = rng.choice(STORY_ADD if sign == "+" else STORY_SUBTRACT)
        user = asked.format(a=a, b=b, i=item, n=name, d=rng.choice(words.DAYS))
        return Turn(user, f"{a} {sign} {b} = {value}, so the answer is {value} {item}.", steps, facts=facts)
    user = rng.choice(ADD if sign == "+" else SUBTRACT).format(a=a, b=b)
    return Turn(user, f"{a} {sign} {b} = {value}", steps, facts=facts)


def compare_turn(rng):
    a, b = rng.sample(range(1, 100), 2)
    if rng.random() < 0.5:
        return Turn(f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger than {min(a, b)}.",
                    f"I compare {a} and {b}. {max(a, b)} is more.")
    n = rng.randint(1, 90)
    m = n + rng.randint(2, 9)
    return Turn(f"Count from {n} to {m}.", ", ".join(map(str, range(n, m + 1))) + ".", f"I count from {n} up to {m}.")


# ---- facts and small talk --------------------------------------------------------------------------------------------

TALK = [
    (("Hello", "Hi", "Hello!", "Hi there", "Good day", "Hey"), "Hello! How can I help you?", "The user says hello."),
    (("How are you?", "How do you do?", "How is it going?"), "I am fine, thank you. How can I help you?",
     "The user asks how I am."),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
     "I am Fathom Tiny, a very small language model. I know a few facts, do small sums and call tools.",
     "The user asks who I am."),
    (("Thank you!", "Thanks", "Thanks a lot.", "That was helpful."), "You are welcome!", "The user thanks me."),
    (("Goodbye", "Bye", "See you later.", "Good night."), "Goodbye! Have a nice day.", "The user says goodbye."),
    (("What can you do?", "How can you help me?", "What do you know?"),
     "I can tell short stories, answer simple questions, add and subtract, read a text and call tools.",
     "The user asks what I can do."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the clock go to school? Because it wanted to learn the time.", "The user wants a joke."),
]
UNKNOWN = ["Who won the game last night?", "What did I eat yesterday?", "What is my password?", "What am I thinking of?",
           "Where did I put my keys?", "Who will win the election?", "What is the meaning of life?"]


def talk_turn(rng):
    if rng.random() < 0.15:
        return Turn(rng.choice(UNKNOWN), "I am sorry, I do not know that.", "I cannot know this.")
    asked, answer, reasoning = rng.choice(TALK)
    return Turn(rng.choice(asked), answer, reasoning)


def introduction(rng):
    """(the turn in which the user says who they are, a maker of turns that ask for it later)."""
    name, city, hobby = rng.choice(words.NAMES), rng.choice(words.CITIES), rng.choice(words.HOBBIES)
    told = Turn(rng.choice((f"My name is {name}. I live in {city} and I like {hobby}.",
                            f"Hello, I am {name} from {city} and my hobby is {hobby}.")),
                f"Nice to meet you, {name}!", f"The user is {name} from {city} and likes {hobby}.")

    def ask(rng):
        asked, answer = rng.choice((("What is my name?", f"Your name is {name}."), ("Who am I?", f"You are {name}."),
                                    ("Where do I live?", f"You live in {city}."), ("What do I like?", f"You like {hobby}."),
                                    ("What is my hobby?", f"Your hobby is {hobby}.")))
        return Turn(asked, answer, f"The user told me: {name}, {city}, {hobby}.")
    return told, ask


def country_fact(rng):
    country, (capital, language, continent) = rng.choice(list(words.COUNTRIES.items()))
    return rng.choice([
        Turn(rng.choice((f"What is the capital of {country}?", f"Which city is the capital of {country}?",
                         f"Tell me the capital of {country}.")),
             f"The capital of {country} is {capital}.", f"The user asks for the capital of {country}. It is {capital}."),
        Turn(rng.choice((f"Which language do people speak in {country}?", f"What language is spoken in {country}?")),
             f"People in {country} speak {language}.", f"The user asks for the language of {country}. It is {language}."),
        Turn(rng.choice((f"Where is {country}?", f"On which continent is {country}?")),
             f"{country} is in {continent}.", f"The user asks where {country} is. It is in {continent}."),
        Turn(f"Tell me about {country}.",
             f"{country} is a country in {continent}. Its capital is {capital}, and people there speak {language}.",
             f"The user wants to know about {country}."),
    ])


def animal_fact(rng):
    animal, (sound, home, food, legs, young) = rng.choice(list(words.ANIMALS.items()))
    a = article(animal)
    big = a[0].upper() + a[1:]
    return rng.choice([
        Turn(f"Where does {a} live?", f"{big} lives in {home}.", f"The user asks where {a} lives. It is {home}."),
        Turn(f"What does {a} eat?", f"{big} eats {food}.", f"The user asks what {a} eats. It is {food}."),
        Turn(f"How many legs does {a} have?", f"{big} has {legs} legs.", f"I count the legs of {a}: {legs}."),
        Turn(f"What is a young {animal} called?", f"A young {animal} is called {article(young)}.",
             f"The user asks for the young of {a}: {young}."),
        Turn(f"What sound does {a} make?", f"{big} {sound}.", f"The user asks about the sound of {a}."),
        Turn(f"Tell me about the {animal}.",
             f"The {animal} lives in {home} and eats {food}. It has {legs} legs, and its young is called {article(young)}.",
             f"The user wants to know about the {animal}."),
    ])


def word_fact(rng):
    pick = rng.randrange(6)
    if pick == 0:
        word, other = rng.choice(list(words.OPPOSITES.items()))
        return Turn(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.",
                    f"The user asks for the opposite of {word}. It is {other}.")
    if pick == 1:
        thing, color = rng.choice(list(words.THINGS_COLOR.items()))
        return Turn(f"What color is {thing}?", f"{thing[0].upper() + thing[1:]} is {color}.",
                    f"The user asks for the color of {thing}. It is {color}.")
    if pick == 2:
        thing, parts = rng.choice(list(words.MADE_OF.items()))
        return Turn(f"What is {thing} made of?", f"{thing[0].upper() + thing[1:]} is made of {parts}.",
                    f"The user asks what {thing} is made of. It is {parts}.")
    if pick == 3:
        job, does = rng.choice(list(words.JOBS.items()))
        return Turn(f"What does {article(job)} do?", f"{article(job).capitalize()} {does}.",
                    f"The user asks about the job of {article(job)}.")
    names, kind = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    i = rng.randrange(len(names))
    if pick == 4:
        return Turn(f"Which {kind} comes after {names[i]}?", f"After {names[i]} comes {names[(i + 1) % len(names)]}.",
                    f"The {kind} after {names[i]} is {names[(i + 1) % len(names)]}.")
    return Turn(f"Which {kind} comes before {names[i]}?", f"Before {names[i]} comes {names[i - 1]}.",
                f"The {kind} before {names[i]} is {names[i - 1]}.")


def fact_turn(rng):
    return rng.choice((country_fact, country_fact, animal_fact, word_fact, word_fact))(rng)


# ---- stories, lists, JSON --------------------------------------------------------------------------------------------

def story_turn(rng):
    who = stories.cast(rng)
    hero, thing = who["hero"], article(who["thing"])
    asked = rng.choice((
        (f"Tell me a short story about {hero} and {thing}.", f"a story about {hero} and {thing}"),
        (f"Write a story about {hero}.", f"a story about {hero}"),
        ("Tell me a story.", "a story"), ("Please tell me a short story.", "a story"),
        (f"Write a short story with {hero} and {who['friend']}.", f"a story with {hero} and {who['friend']}"),
        (f"I would like a story about a {who['animal']} and {hero}.", f"a story about a {who['animal']} and {hero}"),
    ))
    return Turn(asked[0], stories.story(rng, who), f"The user wants {asked[1]}. I keep it short.")


def list_turn(rng):
    pool = rng.choice((words.ANIMALS, words.FOODS, words.OBJECTS, words.CITIES, words.NAMES, words.COLORS))
    items = rng.sample(list(pool), rng.randint(3, 8))
    if rng.random() < 0.3:
        items = [words.made_up_word(rng) for _ in items]
    listed = ", ".join(items)
    pick = rng.randrange(5)
    if pick == 0:
        return Turn(f"Repeat these words: {listed}", listed, "I repeat the words.")
    if pick == 1:
        return Turn(f"Write these words in reverse order: {listed}", ", ".join(reversed(items)), "I start with the last word.")
    if pick == 2:
        return Turn(f"How many words are in this list: {listed}?", f"There are {len(items)} words.",
                    "I count: " + ", ".join(f"{i + 1} {w}" for i, w in enumerate(items)) + ".")
    if pick == 3:
        i = rng.randrange(3)
        place = ("first", "second", "third")[i]
        return Turn(f"What is the {place} word of this list: {listed}?", f"The {place} word is {items[i]}.",
                    f"The {place} word is {items[i]}.")
    return Turn(f"Make a bullet list of {listed}.", "\n".join(f"- {w}" for w in items), "One line for each word.")


def json_turn(rng):
    name, city, hobby, age = rng.choice(words.NAMES), rng.choice(words.CITIES), rng.choice(words.HOBBIES), rng.randint(18, 90)
    fields = {"name": name, "city": city, "hobby": hobby, "age": age}
    keep = ["name"] + [k for k in ("city", "hobby", "age") if rng.random() < 0.7]
    told = {"city": f"lives in {city}", "hobby": f"likes {hobby}", "age": f"is {age} years old"}
    said = name + " " + " and ".join(told[k] for k in keep[1:]) if keep[1:] else f"The name is {name}"
    asked = rng.choice(("Write this as JSON: {}.", "Give me JSON for: {}.", "Answer with JSON only. {}."))
    return Turn(asked.format(said), json.dumps({k: fields[k] for k in keep}), "The user wants JSON with " + ", ".join(keep) + ".",
                facts={"kind": "json"})


# ---- tools -----------------------------------------------------------------------------------------------------------

def tool_turn(rng, tool):
    arguments = tool.arguments(rng)
    result = tool.result(rng, arguments)
    answer = tool.answer.format(**{**arguments, **result})
    return Turn(catalog.request(rng, tool, arguments), answer, f"The tool {tool.name} answered. I tell the user.",
                [(tool.name, arguments, result)],
                f"The user wants to {tool.purpose.format(**arguments)}. I call {tool.name}.",
                {"kind": "tool", "name": tool.name, "arguments": arguments})


def two_tools_turn(rng, first, second):
    """One request for two things: both calls in one block."""
    a, b = tool_turn(rng, first), tool_turn(rng, second)
    return Turn(f"{a.user} {rng.choice(('Also:', 'And then:', 'Second:'))} {b.user}", f"{a.answer} {b.answer}",
                "The tools answered. I tell the user.", a.calls + b.calls, f"{a.call_reasoning} {b.call_reasoning}")


def missing_tool_turn(rng, tool):
    """A request for a tool that is not on offer."""
    asked = catalog.request(rng, tool, tool.arguments(rng))
    return Turn(asked, "I am sorry, I have no tool for that.", "None of my tools can do this.", facts={"kind": "no tool"})


# ---- passages and needles --------------------------------------------------------------------------------------------

def people(rng, count):
    """People with attributes that no two of them share: name -> attributes."""
    names = rng.sample(words.NAMES, count)
    pools = {"city": words.CITIES, "job": list(words.JOBS), "hobby": words.HOBBIES, "thing": words.OBJECTS}
    drawn = {k: rng.sample(pool, min(count, len(pool))) for k, pool in pools.items()}
    return {n: {k: drawn[k][i % len(drawn[k])] for k in pools} | {"color": rng.choice(words.COLORS), "age": rng.randint(18, 90)}
            for i, n in enumerate(names)}


def passage(rng, crowd):
    """Sentences about each person, in random order."""
    out = []
    for name, p in crowd.items():
        out += [rng.choice((f"{name} lives in {p['city']}.", f"The home of {name} is in {p['city']}.")),
                rng.choice((f"{name} works as {article(p['job'])}.", f"The job of {name} is {p['job']}.")),
                rng.choice((f"{name} likes {p['hobby']}.", f"In the evening {name} enjoys {p['hobby']}.")),
                f"{name} owns {article(p['color'])} {p['thing']}.", f"{name} is {p['age']} years old."]
    if rng.random() < 0.6:
        rng.shuffle(out)
    return out


def passage_turn(rng, crowd):
    name, p = rng.choice(list(crowd.items()))
    forward = rng.choice((
        (f"Where does {name} live?", f"{name} lives in {p['city']}."),
        (f"What is the job of {name}?", f"{name} works as {article(p['job'])}."),
        (f"What does {name} like?", f"{name} likes {p['hobby']}."),
        (f"What does {name} own?", f"{name} owns {article(p['color'])} {p['thing']}."),
        (f"How old is {name}?", f"{name} is {p['age']} years old."),
    ))
    backward = rng.choice((
        (f"Who lives in {p['city']}?", f"{name} lives in {p['city']}."),
        (f"Who likes {p['hobby']}?", f"{name} likes {p['hobby']}."),
        (f"Who works as {article(p['job'])}?", f"{name} works as {article(p['job'])}."),
    ))
    asked, answer = forward if rng.random() < 0.5 else backward
    return Turn(asked, answer, f"The text says: {answer}", facts={"kind": "passage", "value": answer})


def echo(rng, period, length):
    """Random digits that repeat after `period` of them, and where the repeats begin. Few distinct digits make what came
    before a poor guide: only the exact distance helps, 127 tokens back (the window's last) or beyond the window. A period of
    512 is beyond what four windows one after another reach, so it takes the place of compressed entries."""
    digits = rng.sample("0123456789", rng.choice((2, 2, 3, 5)))
    block = "".join(rng.choice(digits) for _ in range(period))
    head = f"Echo {period}: {block}"
    return head, (block * (length // period + 1))[:length]


def needle(rng):
    """(key, sentence, question, answer, value) with a value that cannot be guessed."""
    if rng.random() < 0.7:
        key = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.PLACES)}"
        value = str(rng.randint(1000, 99999))
        sentence = f"The secret number of the {key} is {value}."
        asked = rng.choice((f"What is the secret number of the {key}?", f"Tell me the secret number of the {key}."))
    else:
        key = rng.choice(words.NAMES)
        value = words.made_up_word(rng)
        sentence = f"The magic word of {key} is {value}."
        asked = rng.choice((f"What is the magic word of {key}?", f"Tell me the magic word of {key}."))
    return key, sentence, asked, sentence, value


def needles(rng, count):
    found = {}
    while len(found) < count:
        n = needle(rng)
        found[n[0]] = n
    return list(found.values())


def haystack(rng, hidden, characters):
    """Filler sentences and now and then a story, with the hidden sentences at random places."""
    parts, size = [], sum(len(h) + 1 for h in hidden)
    while size < characters:
        part = stories.filler(rng) if rng.random() < 0.8 else stories.story(rng, stories.cast(rng), 4)
        parts.append(part)
        size += len(part) + 1
    for sentence in hidden:
        parts.insert(rng.randint(0, len(parts)), sentence)
    return " ".join(parts)


def needle_turn(item):
    _, _, asked, answer, value = item
    return Turn(asked, answer, f"The text says: {answer}", facts={"kind": "needle", "value": value})
