"""Search of WebShop (Yao et al. 2022, arXiv 2207.01206): an English analyser and BM25.

With numpy, regex and nltk's stemmer. The original asks Lucene through a Java virtual machine. The
rankings here are equal to Lucene's, ties included, which takes three things that ready-made BM25
packages leave out: Unicode word boundaries (UAX #29), the document length kept in one byte, and
float32 scores.
"""

import functools
import hashlib
import json
import os
import tempfile
import zipfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import regex

K1 = np.float32(0.9)
B = np.float32(0.4)
MAX_QUERY_TERMS = 1024
MAX_TOKEN = 255
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such "
    "that the their then there these they this to was will with".split()
)

# One segment between two word boundaries; scripts without spaces (Thai, Lao, Khmer, ...) stay in
# one piece.
_SEGMENT = regex.compile(r"(?wsV1)\p{LB=SA}[\p{LB=SA}\p{WB=Extend}\p{WB=Format}]*|.+?\b")
# What makes a segment a word: a letter, a digit, an ideograph or an emoji. Bare #, * and single
# flags are none.
_WORD = regex.compile(
    r"(?V1)[\p{WB=ALetter}\p{WB=Hebrew_Letter}\p{WB=Numeric}\p{WB=Katakana}\p{Han}\p{Hiragana}"
    r"\p{LB=SA}\p{Extended_Pictographic}\p{Emoji_Modifier}]|\p{WB=Regional_Indicator}{2}|[#*]\uFE0F?\u20E3"
)


def cache_directory() -> Path:
    """Directory of cached data: $XDG_CACHE_HOME/istar or ~/.cache/istar."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "istar"


def write_atomically(path, write):
    """Let write(file) fill a temporary file beside `path`, then rename it.

    A full or read-only disk is no error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else


@functools.cache
def _stemmer():
    # imported late: it costs 0.3 s, and replays may not need it
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS)


def _lower(character):
    """One character for one: no final sigma, and lower cases of two characters do not grow."""
    if character == "İ":
        return "i"
    lower = character.lower()
    return lower if len(lower) == 1 else character


@functools.lru_cache(maxsize=100_000)
def _term(segment):
    """Index term of one segment, or None for white space, punctuation and stop words."""
    if not _WORD.search(segment):
        return None
    if segment[-2:] in ("'s", "'S", "’s", "’S", "＇s", "＇S"):
        segment = segment[:-2]
    if segment.isascii():
        segment = segment.lower()
    else:
        segment = "".join(map(_lower, segment))
    if segment in STOP_WORDS:
        return None
    return _stemmer().stem(segment, to_lowercase=False)


def analyze(text: str) -> list[str]:
    """Index terms of a text, in order.

    They are UAX #29 words, possessive 's off, in lower case, no stop words, as Porter stems.
    """
    terms = []
    for segment in _SEGMENT.findall(text):
        pieces = (segment,)
        if len(segment) > MAX_TOKEN:
            pieces = [segment[i : i + MAX_TOKEN] for i in range(0, len(segment), MAX_TOKEN)]
        for piece in pieces:
            term = _term(piece)
            if term is not None:
                terms.append(term)
    return terms


def _stored_length(length):
    """Document length as one byte keeps it.

    It is exact below 40; above that it has 4 significant bits of (length - 24).
    """
    if length < 40:
        return length
    shift = (length - 24).bit_length() - 4
    return ((length - 24) >> shift << shift) + 24


class SearchIndex:
    """BM25 index of (id, contents) pairs.

    `cache` names a directory that keeps the built index between processes. A term's postings are
    doc[start:end], document numbers, and saturation[start:end], float32, 1 + f / norm(document).
    Documents are numbered in the order of their ids, so that ties fall to the smaller id.
    """

    def __init__(self, documents, cache=None):
        documents = sorted(documents, key=lambda d: d[0])
        self.ids = [d[0] for d in documents]
        path = None
        if cache is not None:
            key = hashlib.sha256(f"1 regex {version('regex')} nltk {version('nltk')}".encode())
            for document in documents:
                key.update(json.dumps(document).encode())
            path = Path(cache) / f"index-{key.hexdigest()[:32]}.npz"
        if path is None or not self._load(path):
            self._build([contents for _, contents in documents])
            if path is not None:
                write_atomically(path, self._save)

    def _build(self, texts):
        numbers = {}
        doc, term, frequency = [], [], []
        lengths = np.zeros(len(texts), np.int64)
        for i, text in enumerate(texts):
            terms = analyze(text)
            lengths[i] = len(terms)
            counts = Counter(terms)
            doc.extend([i] * len(counts))
            term.extend(numbers.setdefault(t, len(numbers)) for t in counts)
            frequency.extend(counts.values())
        filled = int((lengths > 0).sum())  # documents without a term do not count
        average = np.float32(lengths.sum() / max(filled, 1))
        stored = np.array([_stored_length(int(n)) for n in lengths], np.float32)
        # an index without a term has average 0 and no postings
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.float32(1) / (K1 * ((np.float32(1) - B) + B * stored / average))
        doc = np.array(doc, np.int32)
        term = np.array(term, np.int32)
        order = np.argsort(term, kind="stable")
        self.doc = doc[order]
        self.saturation = np.float32(1) + np.array(frequency, np.float32)[order] * inverse[self.doc]
        self.starts = np.searchsorted(term[order], np.arange(len(numbers) + 1))
        n = np.diff(self.starts).astype(np.float64)
        self.idf = np.log(1 + (filled - n + 0.5) / (n + 0.5)).astype(np.float32)
        self.numbers = numbers

    def _save(self, file):
        terms = np.frombuffer(json.dumps(list(self.numbers)).encode(), np.uint8)
        np.savez(
            file,
            terms=terms,
            doc=self.doc,
            saturation=self.saturation,
            starts=self.starts,
            idf=self.idf,
        )

    def _load(self, path):
        """Read the cached arrays; False where the file is absent or damaged."""
        try:
            with np.load(path, allow_pickle=False) as data:
                terms = json.loads(data["terms"].tobytes())
                self.numbers = {t: i for i, t in enumerate(terms)}
                self.doc, self.saturation = data["doc"], data["saturation"]
                self.starts, self.idf = data["starts"], data["idf"]
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
            return False
        whole = len(self.idf) == len(terms) == len(self.starts) - 1
        return whole and len(self.doc) == len(self.saturation) == self.starts[-1]

    def search(self, query: str, k: int = 50) -> list:
        """The at most k ids that match best, best first. ValueError beyond 1,024 distinct terms."""
        return [self.ids[i] for i in self.scores(query, k)[0]]

    def scores(self, query, k=50):
        """(document numbers, float32 BM25 scores) of the k best documents.

        Ties are in the order of the ids.
        """
        counts = Counter(analyze(query))
        if len(counts) > MAX_QUERY_TERMS:
            limit = f"at most {MAX_QUERY_TERMS} are allowed"
            raise ValueError(f"a query of {len(counts)} distinct terms; {limit}")

        total = np.zeros(len(self.ids))
        for term, count in counts.items():
            number = self.numbers.get(term)
            if number is None:
                continue
            postings = slice(self.starts[number], self.starts[number + 1])
            weight = self.idf[number] * np.float32(count)
            # this form in float32, then a sum in double: any other rounding breaks ties another way
            total[self.doc[postings]] += weight - weight / self.saturation[postings]

        total = total.astype(np.float32)
        found = np.flatnonzero(total > 0)
        if 0 < k < len(found):
            floor = -np.partition(-total[found], k - 1)[k - 1]
            found = found[total[found] >= floor]
        best = found[np.argsort(-total[found], kind="stable")][:k]
        return best, total[best]
