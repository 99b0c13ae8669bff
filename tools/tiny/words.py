"""The small world that fathom-tiny knows: its words and its facts. Written for this project."""

NAMES = """Anna Ben Carla David Emma Felix Grace Hugo Iris Jack Karen Leo Maria Noah Olga Paul Rosa Sam Tina Victor
Wendy Omar Lucy Mark Nina Peter Sara Tom Ella Adam Julia Max Clara Simon Alice Robert Helen George Laura Daniel""".split()
FEMALE = set("""Anna Carla Emma Grace Iris Karen Maria Olga Rosa Tina Wendy Lucy Nina Sara Ella Julia Clara Alice Helen
Laura""".split())

# country: (capital, language, continent)
COUNTRIES = {
    "France": ("Paris", "French", "Europe"), "Spain": ("Madrid", "Spanish", "Europe"),
    "Italy": ("Rome", "Italian", "Europe"), "Germany": ("Berlin", "German", "Europe"),
    "Norway": ("Oslo", "Norwegian", "Europe"), "Sweden": ("Stockholm", "Swedish", "Europe"),
    "Finland": ("Helsinki", "Finnish", "Europe"), "Poland": ("Warsaw", "Polish", "Europe"),
    "Greece": ("Athens", "Greek", "Europe"), "Portugal": ("Lisbon", "Portuguese", "Europe"),
    "Ireland": ("Dublin", "English", "Europe"), "Austria": ("Vienna", "German", "Europe"),
    "Hungary": ("Budapest", "Hungarian", "Europe"), "Denmark": ("Copenhagen", "Danish", "Europe"),
    "Japan": ("Tokyo", "Japanese", "Asia"), "China": ("Beijing", "Chinese", "Asia"),
    "India": ("New Delhi", "Hindi", "Asia"), "Thailand": ("Bangkok", "Thai", "Asia"),
    "Vietnam": ("Hanoi", "Vietnamese", "Asia"), "Turkey": ("Ankara", "Turkish", "Asia"),
    "Egypt": ("Cairo", "Arabic", "Africa"), "Kenya": ("Nairobi", "Swahili", "Africa"),
    "Morocco": ("Rabat", "Arabic", "Africa"), "Ghana": ("Accra", "English", "Africa"),
    "Canada": ("Ottawa", "English", "North America"), "Mexico": ("Mexico City", "Spanish", "North America"),
    "Cuba": ("Havana", "Spanish", "North America"), "Brazil": ("Brasilia", "Portuguese", "South America"),
    "Peru": ("Lima", "Spanish", "South America"), "Chile": ("Santiago", "Spanish", "South America"),
    "Argentina": ("Buenos Aires", "Spanish", "South America"), "Australia": ("Canberra", "English", "Oceania"),
}
CITIES = [c[0] for c in COUNTRIES.values()] + """London Boston Chicago Seattle Toronto Sydney Munich Milan Geneva Porto
Bergen Lyon Naples Osaka Shanghai Mumbai""".split()

# animal: (sound verb, home, food, legs, young)
ANIMALS = {
    "dog": ("barks", "a kennel", "meat", 4, "puppy"), "cat": ("meows", "a warm house", "fish", 4, "kitten"),
    "cow": ("moos", "a barn", "grass", 4, "calf"), "horse": ("neighs", "a stable", "hay", 4, "foal"),
    "sheep": ("bleats", "a field", "grass", 4, "lamb"), "duck": ("quacks", "a pond", "seeds", 2, "duckling"),
    "lion": ("roars", "the savanna", "meat", 4, "cub"), "bee": ("buzzes", "a hive", "nectar", 6, "larva"),
    "owl": ("hoots", "a hollow tree", "mice", 2, "owlet"), "frog": ("croaks", "a pond", "flies", 4, "tadpole"),
    "wolf": ("howls", "a den", "meat", 4, "pup"), "mouse": ("squeaks", "a small hole", "cheese", 4, "pup"),
    "bear": ("growls", "a cave", "honey", 4, "cub"), "snake": ("hisses", "a burrow", "eggs", 0, "snakelet"),
    "hen": ("clucks", "a coop", "corn", 2, "chick"), "fox": ("yips", "a den", "berries", 4, "kit"),
    "spider": ("is silent", "a web", "flies", 8, "spiderling"), "crow": ("caws", "a nest", "seeds", 2, "chick"),
    "rabbit": ("is quiet", "a burrow", "carrots", 4, "kit"), "turtle": ("is quiet", "a pond", "leaves", 4, "hatchling"),
}
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "light": "dark", "happy": "sad", "old": "new", "tall": "short",
    "full": "empty", "open": "closed", "wet": "dry", "hard": "soft", "early": "late", "clean": "dirty", "loud": "quiet",
    "rich": "poor", "strong": "weak", "up": "down", "left": "right", "inside": "outside", "first": "last",
    "high": "low", "long": "brief", "sweet": "sour", "brave": "afraid", "heavy": "weightless", "near": "far",
}
THINGS_COLOR = {
    "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black", "the sky": "blue", "blood": "red",
    "a carrot": "orange", "a plum": "purple", "chocolate": "brown", "milk": "white", "a lemon": "yellow",
    "a ripe tomato": "red", "a flamingo": "pink", "an elephant": "gray", "the sea": "blue", "a leaf": "green",
}
MADE_OF = {
    "bread": "flour, water, yeast and salt", "glass": "sand", "paper": "wood", "cheese": "milk", "wine": "grapes",
    "butter": "cream", "a candle": "wax", "a brick": "clay", "ice": "frozen water", "honey": "nectar", "a tire": "rubber",
    "a sweater": "wool", "steam": "hot water", "a coin": "metal", "jam": "fruit and sugar", "an omelet": "eggs",
}
JOBS = {
    "baker": "bakes bread", "farmer": "grows food", "doctor": "helps sick people", "teacher": "teaches children",
    "pilot": "flies planes", "sailor": "sails ships", "painter": "paints pictures", "cook": "cooks meals",
    "gardener": "looks after plants", "carpenter": "builds with wood", "writer": "writes books",
    "nurse": "cares for patients", "fisher": "catches fish", "tailor": "sews clothes", "builder": "builds houses",
    "singer": "sings songs",
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November December""".split()
COLORS = "red blue green yellow orange purple brown black white gray pink silver golden".split()
ADJECTIVES = """old small quiet brave wooden bright hidden broken gentle tall narrow frozen dusty shiny round heavy
ancient lonely crooked distant""".split()
PLACES = """castle bridge garden library market harbor tower mill cabin station school bakery forest river mountain
village island museum lighthouse farm cave meadow workshop temple""".split()
OBJECTS = """lamp key book boat kite bell map coin clock box ring drum hat basket mirror rope letter candle flute
blanket shell wheel ladder cup stone""".split()
FOODS = "bread soup apples cheese cake rice pears cookies noodles beans honey eggs plums pancakes tomatoes grapes".split()
ITEMS = """apples pears books coins pens cards shells stones marbles stamps eggs cups tickets buttons nuts plums
flowers candles keys stickers""".split()
HOBBIES = """painting fishing reading swimming cooking singing dancing sailing gardening running chess photography
climbing knitting cycling pottery""".split()
INSTRUMENTS = "piano violin guitar flute drum trumpet cello harp".split()
WEATHER = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear"]
SYLLABLES = """ba be bo da de do fa fi ga go ka ki ko la le lo ma mi mo na ne no pa pi ra re ro sa se so ta te to va
vi za zo""".split()


def made_up_word(rng):
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3, 3))))


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def pronoun(name):
    return ("she", "her", "her") if name in FEMALE else ("he", "his", "him")
