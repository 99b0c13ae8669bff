"""The tools that fathom-tiny is trained to call: schema, requests, arguments, results and the answer made of them."""
from dataclasses import dataclass, replace
from typing import Callable

from words import CITIES, COUNTRIES, DAYS, FOODS, HOBBIES, NAMES, OBJECTS, WEATHER


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    properties: dict  # JSON schema of each parameter
    requests: list  # user texts, formatted with the arguments
    arguments: Callable  # rng -> arguments in schema order
    result: Callable  # (rng, arguments) -> JSON-able result
    answer: str  # formatted with arguments and result
    purpose: str  # "The user wants to {purpose}."

    def schema(self):
        return {"type": "function", "function": {
            "name": self.name, "description": self.description,
            "parameters": {"type": "object", "properties": self.properties, "required": list(self.properties)}}}


def text(description, **more):
    return {"type": "string", "description": description, **more}


def integer(description):
    return {"type": "integer", "description": description}


def clock(rng):
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


SUBJECTS = "lunch exam rent party train dentist report meeting birthday flight homework dinner".split()
TOPICS = HOBBIES + ["volcanoes", "whales", "old castles", "the moon", "bread", "trains", "rivers", "bees"]

TOOLS = [
    Tool("get_weather", "Get the weather for a specific location",
         {"location": text("The city name"), "unit": text("Temperature unit", enum=["celsius", "fahrenheit"])},
         ["What is the weather in {location} in {unit}?", "How warm is it in {location}? Use {unit}.",
          "Tell me the weather in {location}, in {unit} please.", "I need the temperature in {location} in {unit}."],
         lambda r: {"location": r.choice(CITIES), "unit": r.choice(["celsius", "fahrenheit"])},
         lambda r, a: {"temperature": r.randint(1, 99), "condition": r.choice(WEATHER)},
         "The weather in {location} is {condition} with a temperature of {temperature} degrees {unit}.",
         "know the weather in {location}"),
    Tool("get_time", "Get the current local time of a city", {"city": text("The city name")},
         ["What time is it in {city}?", "Tell me the local time in {city}.", "What is the time now in {city}?",
          "Can you check the clock in {city}?"],
         lambda r: {"city": r.choice(CITIES)}, lambda r, a: {"time": clock(r)},
         "It is {time} in {city}.", "know the time in {city}"),
    Tool("search", "Search the web for information", {"query": text("Search query")},
         ["Search the web for {query}.", "Look up {query} on the web.", "Find some pages about {query}.",
          "Please search for {query}."],
         lambda r: {"query": r.choice(TOPICS)},
         lambda r, a: {"title": f"All about {a['query']}", "pages": r.randint(2, 99)},
         "I found {pages} pages about {query}. The first is called \"{title}\".", "find pages about {query}"),
    Tool("send_message", "Send a short message to a person", {"to": text("Name of the person"), "body": text("The text")},
         ["Send {to} this message: {body}", "Tell {to} by message: {body}", "Write to {to}: {body}",
          "Message {to} with the words: {body}"],
         lambda r: {"to": r.choice(NAMES), "body": r.choice([
             f"The {r.choice(SUBJECTS)} is on {r.choice(DAYS)}.", f"I will be there at {clock(r)}.",
             f"Please bring {r.choice(FOODS)}.", f"I found your {r.choice(OBJECTS)}."])},
         lambda r, a: {"sent": True, "id": r.randint(100, 999)},
         "Your message to {to} was sent with number {id}.", "send a message to {to}"),
    Tool("set_alarm", "Set an alarm", {"time": text("Time as HH:MM"), "label": text("What the alarm is for")},
         ["Set an alarm at {time} for the {label}.", "Wake me at {time} for the {label}.",
          "I need an alarm for the {label} at {time}.", "Please make an alarm called {label} at {time}."],
         lambda r: {"time": clock(r), "label": r.choice(SUBJECTS)}, lambda r, a: {"ok": True, "alarms": r.randint(1, 9)},
         "The alarm for the {label} is set at {time}. You now have {alarms} alarms.", "set an alarm at {time}"),
    Tool("add_event", "Add an event to the calendar", {"title": text("Name of the event"), "day": text("Day of the week"),
                                                       "hour": integer("Hour from 0 to 23")},
         ["Put {title} in my calendar on {day} at {hour}.", "Add the event {title} on {day} at hour {hour}.",
          "Plan {title} for {day} at {hour}.", "Schedule {title} at {hour} on {day}."],
         lambda r: {"title": r.choice(SUBJECTS + HOBBIES), "day": r.choice(DAYS), "hour": r.randint(0, 23)},
         lambda r, a: {"event": r.randint(100, 999)},
         "I added {title} on {day} at {hour}. It is event {event}.", "add an event on {day}"),
    Tool("multiply", "Multiply two integers", {"a": integer("First factor"), "b": integer("Second factor")},
         ["What is {a} times {b}?", "Multiply {a} by {b}.", "Calculate {a} * {b}.", "How much is {a} multiplied by {b}?"],
         lambda r: {"a": r.randint(12, 999), "b": r.randint(12, 999)}, lambda r, a: {"product": a["a"] * a["b"]},
         "{a} times {b} is {product}.", "multiply {a} and {b}"),
    Tool("get_stock_price", "Get the price of a stock in dollars", {"symbol": text("Ticker symbol")},
         ["What is the price of the stock {symbol}?", "How much is one share of {symbol}?", "Get the stock price of {symbol}.",
          "Check {symbol} on the stock market."],
         lambda r: {"symbol": "".join(r.choice("ABCDEFGHIKLMNOPRSTUVWXZ") for _ in range(r.choice((3, 4))))},
         lambda r, a: {"price": r.randint(3, 980)},
         "One share of {symbol} costs {price} dollars.", "know the price of {symbol}"),
    Tool("translate", "Translate a word into another language", {"word": text("The word"), "language": text("Target language")},
         ["Translate the word {word} into {language}.", "How do you say {word} in {language}?",
          "What is {word} in {language}?", "Give me the {language} word for {word}."],
         lambda r: {"word": r.choice(OBJECTS + FOODS), "language": r.choice(sorted({c[1] for c in COUNTRIES.values()}))},
         lambda r, a: {"translation": "".join(r.choice(["ka", "lo", "mi", "ta", "re", "su", "no", "vel"]) for _ in range(3))},
         "The word {word} in {language} is {translation}.", "translate {word} into {language}"),
    Tool("roll_dice", "Roll some dice", {"count": integer("How many dice"), "sides": integer("Sides of each die")},
         ["Roll {count} dice with {sides} sides.", "Please throw {count} dice that have {sides} sides each.",
          "I want to roll {count} dice of {sides} sides."],
         lambda r: {"count": r.randint(2, 9), "sides": r.choice([4, 6, 8, 10, 12, 20])},
         lambda r, a: {"total": sum(r.randint(1, a["sides"]) for _ in range(a["count"]))},
         "I rolled {count} dice with {sides} sides and the total is {total}.", "roll {count} dice"),
    Tool("find_recipe", "Find a recipe for a dish", {"dish": text("Name of the dish"), "servings": integer("Number of people")},
         ["Find a recipe for {dish} for {servings} people.", "How do I cook {dish} for {servings}?",
          "I want to make {dish} for {servings} guests.", "Show me a recipe of {dish} that serves {servings}."],
         lambda r: {"dish": r.choice(FOODS), "servings": r.randint(2, 12)},
         lambda r, a: {"name": f"Simple {a['dish']}", "minutes": r.randint(10, 95)},
         "I found the recipe \"{name}\" for {servings} people. It takes {minutes} minutes.", "cook {dish}"),
    Tool("book_table", "Book a table in a restaurant", {"city": text("The city name"), "people": integer("Number of people"),
                                                        "time": text("Time as HH:MM")},
         ["Book a table for {people} in {city} at {time}.", "Reserve a table in {city} for {people} people at {time}.",
          "I want to eat out in {city} at {time}, {people} people.", "We are {people} and need a table in {city} at {time}."],
         lambda r: {"city": r.choice(CITIES), "people": r.randint(2, 12), "time": clock(r)},
         lambda r, a: {"table": r.randint(1, 60)},
         "Table {table} in {city} is booked for {people} people at {time}.", "book a table in {city}"),
    Tool("convert_currency", "Convert money from one currency to another",
         {"amount": integer("Amount of money"), "from": text("Source currency"), "to": text("Target currency")},
         ["Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?", "Change {amount} {from} into {to}.",
          "What do I get in {to} for {amount} {from}?"],
         lambda r: dict(zip(("amount", "from", "to"), [r.randint(5, 999)] + r.sample(
             ["dollars", "euros", "pounds", "yen", "francs", "pesos"], 2))),
         lambda r, a: {"result": r.randint(5, 9999)},
         "{amount} {from} are {result} {to}.", "convert {amount} {from}"),
    Tool("play_music", "Play music of an artist", {"artist": text("Name of the artist"), "shuffle": {"type": "boolean",
                                                   "description": "Play in random order"}},
         ["Play songs by {artist}{shuffled}.", "I want to hear {artist}{shuffled}.", "Put on music of {artist}{shuffled}.",
          "Please start some songs from {artist}{shuffled}."],
         lambda r: {"artist": r.choice(NAMES) + " " + r.choice(["Stone", "River", "Hill", "Field", "Wood", "Lake"]),
                    "shuffle": r.random() < 0.5},
         lambda r, a: {"songs": r.randint(3, 60)},
         "Now playing {songs} songs by {artist}.", "hear music of {artist}"),
    Tool("create_file", "Create a file with some content", {"path": text("Path of the file"), "content": text("The content")},
         ["Create the file {path} with the text: {content}", "Write a new file {path} that says: {content}",
          "Make a file called {path} containing: {content}", "Save this to {path}: {content}"],
         lambda r: {"path": f"{r.choice(OBJECTS)}{r.randint(1, 99)}.{r.choice(['txt', 'md', 'log'])}",
                    "content": f"{r.choice(NAMES)} has {r.randint(2, 99)} {r.choice(FOODS)}."},
         lambda r, a: {"bytes": len(a["content"])},
         "I wrote {bytes} bytes to {path}.", "create the file {path}"),
    Tool("get_distance", "Get the distance between two cities in kilometers",
         {"start": text("First city"), "end": text("Second city")},
         ["How far is it from {start} to {end}?", "What is the distance between {start} and {end}?",
          "How many kilometers are there from {start} to {end}?", "Measure the way from {start} to {end}."],
         lambda r: dict(zip(("start", "end"), r.sample(CITIES, 2))),
         lambda r, a: {"kilometers": r.randint(90, 9900)},
         "It is {kilometers} kilometers from {start} to {end}.", "know how far {end} is from {start}"),
]


RENAMED = ["fetch_{}", "my_{}", "{}_tool", "do_{}", "{}_api", "run_{}", "home_{}", "{}_service", "new_{}", "{}_now"]


def renamed(rng, tool):
    """The same tool under another name, so that names are read from the schema rather than known by heart."""
    return replace(tool, name=rng.choice(RENAMED).format(tool.name.split("_")[-1]))


def others(offered):
    """Tools that do something none of those on offer does."""
    known = {t.description for t in offered}
    return [t for t in TOOLS if t.description not in known]


def request(rng, tool, arguments):
    shuffled = " in random order" if arguments.get("shuffle") else " in the usual order"
    return rng.choice(tool.requests).format(shuffled=shuffled, **arguments)
