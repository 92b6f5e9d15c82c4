"""The words that generated tasks are made of. Small lists: a vocabulary of a few thousand tokens covers them whole."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """amber azure bold brave bright brisk bronze calm clear clever cold copper coral crisp curly dark deep dusty
    eager early fair fancy fast fierce final fine firm fluffy frosty gentle giant glad golden grand gray
    green happy hidden hollow honest humble icy jolly keen kind large lazy light little lively lonely loud
    lucky mellow merry mighty misty modern narrow neat noble odd olive pale patient plain polite proud
    purple quick quiet rapid rare red royal rusty sandy scarlet sharp shiny silent silver simple sleepy slow
    small smooth soft solid spare steady stormy strong sunny sweet swift tall tame tender tidy tiny vivid
    warm wild windy wise witty young"""
)

NOUNS = _words(
    """anchor apple arrow badger banner barrel basket beacon beaver bell berry bison bottle branch bridge bucket
    button cabin camel candle canyon castle cedar cherry circle cloud clover comet corner cradle crane creek
    crown desert dolphin dragon drum eagle ember engine falcon feather fender field finch flame forest
    fountain fox garden garnet glacier grove hammer harbor hawk hazel helmet heron hill island ivory jacket
    jaguar kettle ladder lagoon lantern lemon leopard lily lion maple marble meadow mirror monkey moon
    mountain needle oak ocean orchid otter owl panda parrot pebble pepper piano pine planet pocket prairie
    rabbit raven ribbon river rocket saddle sail salmon shadow shell sparrow spider spring squirrel star
    stone summit temple thunder tiger timber tower tulip tunnel turtle valley violin walnut willow window
    wolf"""
)

FIRST_NAMES = _words(
    """Ada Alma Anton Bela Boris Carla Clara Dario Diana Edda Elias Emma Felix Frida Georg Greta Hanna Hugo Ida
    Ivan Jonas Julia Karl Katja Lars Lena Leo Lisa Marco Maria Mila Nadia Nils Nora Olga Oscar Paul Petra
    Pia Robin Rosa Sara Simon Sofia Tara Theo Tilda Tom Vera Viktor Willa Zoe"""
)

LAST_NAMES = _words(
    """Adler Baker Berg Brandt Carter Cole Dahl Ebert Fischer Frost Graf Hale Holt Jensen Keller Klein Lang Lind
    Marsh Meyer Moss Novak Olsen Park Reed Ross Sato Stone Vogel Wells Wolf York"""
)

CITIES = _words(
    """Athens Basel Bergen Berlin Bern Bonn Boston Cairo Delhi Dublin Geneva Graz Hamburg Helsinki Lima Lisbon
    London Lyon Madrid Milan Munich Naples Nice Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Sydney
    Tokyo Turin Vienna Warsaw Zurich"""
)

ITEMS = _words(
    """bag belt bench book bowl box brush cable camera carpet chair clock coat cup desk door fan flag fork glass
    glove hat jar key knife lamp mug pan pen phone pillow plate pot radio ring rope scarf shelf shirt shoe
    sofa spoon table tent towel vase wallet watch wheel"""
)

COLOURS = _words("black blue brown gray green orange pink purple red white yellow")

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

SIZES = _words("small medium large")
