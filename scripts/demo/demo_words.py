"""Words of the training tasks. Their order determines the training stream of the committed models."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _words(
    """
    air ant apple arm art baby bag ball bank bear bed bee bell bird blue boat body bone book box boy bread bridge brush bus
    cake camp car card cat chair city clock cloud coat cold corn cow cup dance dark day deer desk dog door dream drum duck
    ear earth east egg eye face farm fast fig fire fish five flag floor flower fly food foot forest four fox friend frog
    fruit game garden gate gift girl glass goat gold grape grass green hand hat head heart hello hill home horse hot house
    ice idea iron island jam jar jump key king kite knee lake lamp land leaf leg lemon letter light lion list lake long
    love lunch map market milk mint money moon morning mother mouse music nail name neck nest new night north nose note
    nut oak ocean oil old one open orange owl page paint paper park party path peach pear pen pencil piano pig plane plant
    plum pond pot queen quick quiet rain red rice ring river road rock room root rope rose salt sand school sea seed ship
    shoe shop silver six sky sleep snow soap song south spoon spring star stone street sugar summer sun table tail tea ten
    three tiger time train tree truck two uncle under van village voice wall warm water west wheat wheel white wind window
    winter wolf wood world yard year yellow young zebra zero zoo
    """
)
NAMES = _words(
    "anna ben bob cara dan emma eve finn gus ida jack kim leo lily mia nina noah omar pia rosa sam tom uma zoe"
)
THINGS = _words("apples books cards coins cups eggs kites pens plums shells stamps stones")
COLORS = _words("black blue brown green grey orange pink red white yellow")
ANIMALS = _words("bear bird cat cow dog duck fish fox frog horse lion mouse owl pig")
PLACES = _words("attic barn city forest garden house kitchen library market office park school shop tower")
OBJECTS = _words("ball bell book box coat cup drum hat key kite lamp map pen ring rope")
