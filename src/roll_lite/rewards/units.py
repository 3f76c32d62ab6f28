"""Units of measurement in answers: which words name the same one."""

_SPELLINGS = {
    "mm": "millimeter millimeters millimetre millimetres",
    "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "mg": "milligram milligrams",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "d": "day days",
    "wk": "week weeks",
    "yr": "year years yrs",
    "mL": "ml milliliter milliliters millilitre millilitres",
    "L": "liter liters litre litres",
    "$": "dollar dollars usd USD",
    "¢": "cent cents",
    "°": "degree degrees deg",
    "rad": "radian radians",
    "mph": "",
}
CANONICAL = {
    word: symbol for symbol, words in _SPELLINGS.items() for word in (symbol, *words.split())
}
UNITS = frozenset(CANONICAL)
LETTERS = {
    symbol: words.split()[0]
    for symbol, words in _SPELLINGS.items()
    if len(symbol) == 1 and symbol.isalpha()
}
"""Units that look like variables, and their names."""


def differ(unit: str, other: str) -> bool:
    """Whether both units are known and not the same; words we do not know differ from nothing."""
    known = [CANONICAL.get(u) for u in (unit, other)]
    return None not in known and known[0] != known[1]
