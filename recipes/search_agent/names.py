"""Names of invented entities, put together from word lists so that a small tokenizer knows all their parts."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

_FIRST_NAMES = (
    "Ada Alva Anton Astrid Basil Bruno Cora Clement Dora Dexter Edith Edgar Elsa Fabian Fern Gideon Greta Hugo Ida "
    "Iris Jasper Judith Kaspar Lena Linus Mabel Magnus Maud Milo Nadia Nils Olga Oscar Otto Paula Petra Quentin Ralph "
    "Rosa Ruben Selma Silas Stella Tilda Tobias Ursula Vera Viktor Wanda Willem Xenia Yvonne Zelda Zeno"
).split()
_LAST_NAMES = (
    "Abbot Archer Barlow Bishop Carver Chandler Cooper Crane Dalby Draper Ellwood Falconer Farrow Finch Fletcher "
    "Garner Glover Hadley Harper Hawkins Hobbs Ingram Jarvis Keller Lambert Langley Mercer Miller Nash Norwood "
    "Osborne Parker Pike Porter Quill Radley Rowan Sawyer Sexton Slater Spencer Sutton Talbot Tanner Thatcher Tucker "
    "Turner Vance Wainwright Walker Weaver Webster Whitby Wright Yates"
).split()
_TOWN_HEADS = (
    "Ash Beech Bright Broad Brook Clear Cold Copper Dun Elm Fair Fox Glen Gold Grey Hart Hazel High Iron Kings Lang "
    "Lime Mill Moor North Oak Rose Salt Sand Silver Stan Stone Swan Thorn West White Wild Win Wolf Wood"
).split()
_TOWN_TAILS = (
    "bridge burg bury by chester cliff combe dale den field ford gate ham haven hill holt ley mouth stead ton wick "
    "worth"
).split()
_FIRM_HEADS = (
    "Amber Anchor Apex Arrow Atlas Aurora Beacon Cedar Comet Compass Coral Crown Crystal Delta Diamond Eagle Ember "
    "Falcon Granite Harbor Horizon Ivory Jade Juniper Lantern Laurel Lion Lotus Maple Meteor Nova Onyx Opal Orbit "
    "Orion Pearl Phoenix Pioneer Prism Quartz Raven Sapphire Summit Sterling Topaz Trident Velvet Vertex Zenith "
    "Zephyr"
).split()
_FIRM_TAILS = "Bakers Builders Foods Glass Looms Metals Mills Motors Optics Paper Press Pumps Tools Toys Works".split()
_RIVER_HEADS = (
    "Alder Amble Barrow Birch Bram Cam Cress Dart Derwen Eder Fal Fenn Gar Hal Heron Isel Kel Lark Lin Loam Mar Mead "
    "Ner Otter Pebble Reed Rush Rye Sedge Sel Shale Tam Teal Tor Ves Wan Wey Willow Yar"
).split()
_RIVER_TAILS = "beck bourne brook burn fleet gill lynn rill water wend".split()
_LAKE_HEADS = (
    "Ar Bal Cal Dor Esk Fin Gal Hol Il Jor Kal Lor Mor Nar Or Pel Quor Ral Sol Tar Ul Val Wol Xan Yor Zal"
).split()
_LAKE_TAILS = "ban dis gan imer lan mond nock row sten van".split()
_MIDDLES = "el en er in ing ar ow is ock et".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class NameParts:
    """A name is ``head + joint + tail`` behind a prefix; with a middle part when the plain combinations run out."""

    heads: list[str]
    tails: list[str]
    middles: list[str]
    prefix: str = ""
    joint: str = ""

    def draw(self, rng: random.Random, count: int) -> list[str]:
        """Return ``count`` different names, none of which contains another.

        Raises:
            ValueError: there are not so many.
        """
        names = [self.prefix + self.joint.join(parts) for parts in itertools.product(self.heads, self.tails)]
        if count > len(names):
            longer = itertools.product(self.heads, self.middles, self.tails)
            names += [self.prefix + self.joint.join(parts) for parts in longer]
        if count > len(names):
            raise ValueError(f"corpus size: {count} names of one kind are needed, there are {len(names)}; ask for less")
        return rng.sample(names, count)


NAMES = {
    "person": NameParts(heads=_FIRST_NAMES, tails=_LAST_NAMES, middles=_FIRST_NAMES, joint=" "),
    "town": NameParts(heads=_TOWN_HEADS, tails=_TOWN_TAILS, middles=_MIDDLES),
    "company": NameParts(heads=_FIRM_HEADS, tails=_FIRM_TAILS, middles=_TOWN_HEADS, joint=" "),
    "river": NameParts(heads=_RIVER_HEADS, tails=_RIVER_TAILS, middles=_MIDDLES),
    "lake": NameParts(heads=_LAKE_HEADS, tails=_LAKE_TAILS, middles=_MIDDLES, prefix="Lake "),
}
"""Kind of entity to its names."""
