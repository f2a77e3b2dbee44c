"""The index in plain Python, slow and obvious: what `HistoryIndex` must answer, token for token."""

from dataclasses import dataclass, field

from verl_war.history.index import MATCH_BUCKETS, NO_GROUP, NO_SOURCE

OWN, SIBLINGS, EARLIER, GLOBAL = range(4)
ELECTORATES = {OWN: 0, SIBLINGS: 1, EARLIER: 1, GLOBAL: 2}
PAGE = 256
LONG_MATCH = 32
ENOUGH_LONG = 24
LOCAL_ENOUGH = 16
MAX_VOTERS = 24


@dataclass
class Text:
    uid: int
    group: int
    step: int
    shared_from: int
    tokens: list = field(default_factory=list)
    first: int = 0
    live: bool = True
    last_used: int = 0


@dataclass
class Candidate:
    match: int
    text: Text
    next: int
    source: int
    weight: float = 0.0
    token: int = -1


class ReferenceIndex:
    def __init__(self, min_match=(2, 2, 3), max_match=64, max_candidates=32, age_decay=0.8, vote_prior=4.0):
        self.min_match = min_match
        self.max_match = max_match
        self.max_candidates = max_candidates
        self.age_decay = age_decay
        self.vote_prior = vote_prior
        self.texts = {}
        self.positions = []  # (text, offset) in order of insertion
        self.uid = 0
        self.table = [[0.5] * len(MATCH_BUCKETS) for _ in range(4)]

    def begin(self, key, group, step, prompt):
        shared_from = max(0, len(prompt) - self.max_match)
        self.texts[key] = Text(self.uid, group, step, shared_from)
        self.uid += 1
        self.extend(key, prompt)

    def extend(self, key, tokens):
        text = self.texts[key]
        for token in tokens:
            self.positions.append((text, len(text.tokens)))
            text.tokens.append(token)

    def finish(self, key):
        text = self.texts[key]
        text.live = False
        text.first = min(text.shared_from, len(text.tokens)) // PAGE * PAGE

    def drop(self, key):
        gone = self.texts.pop(key)
        self.positions = [(text, offset) for text, offset in self.positions if text is not gone]

    def set_step(self, step, window):
        for key, text in list(self.texts.items()):
            if not text.live and 0 <= text.step < step - window:
                self.drop(key)

    def match(self, text, offset, context):
        length = 0
        while length < len(context) and offset - length >= text.first:
            if text.tokens[offset - length] != context[-1 - length]:
                break
            length += 1
        return length

    def source(self, chain, me, text):
        """Which source a place in `text` is for `me` in this chain; None when it is none."""
        kin = me.group != NO_GROUP and me.group == text.group
        if chain == 0:
            return OWN if text is me and me.live else None
        if text is me:
            return None
        if chain == 1:
            return None if not kin else SIBLINGS if text.step == me.step else EARLIER
        return None if kin else GLOBAL

    def candidates(self, me, context):
        found = [[] for _ in range(3)]
        for chain in range(3):
            longest = max((candidate.match for some in found for candidate in some), default=0)
            if len(context) < self.min_match[chain] or (chain == 2 and longest >= LOCAL_ENOUGH):
                continue
            count = long_ones = 0
            for text, offset in reversed(self.positions):
                source = self.source(chain, me, text)
                if source is None or offset + 1 == len(text.tokens) or offset < text.first:
                    continue
                if chain != 0 and offset < text.shared_from:
                    continue
                length = self.match(text, offset, context)
                if length < self.min_match[chain]:
                    continue
                found[ELECTORATES[source]].append(Candidate(length, text, offset + 1, source))
                long_ones += length >= LONG_MATCH
                count += 1
                if long_ones == ENOUGH_LONG or count == self.max_candidates:
                    break
        return found

    def weigh(self, me, voters):
        voters.sort(key=lambda c: (c.match, c.text.step, c.text.uid, c.next), reverse=True)
        best = voters[0].match
        voters = [voter for voter in voters[:MAX_VOTERS] if 2 * voter.match >= best]
        for voter in voters:
            share = voter.match / best
            voter.weight = share * share * self.age_decay ** max(0, me.step - voter.text.step)
        most = max(voter.weight for voter in voters)
        for voter in voters:
            voter.weight /= most
        return voters

    def prior(self, source, length):
        bucket = max(i for i, start in enumerate(MATCH_BUCKETS) if start <= length)
        return float(self.table[source][bucket])

    def vote(self, me, voters, max_tokens, min_prob, at_end):
        tokens, probs, path, score, first = [], [], 1.0, 0.0, None
        for ahead in range(max_tokens):
            active = []
            for voter in voters:
                at = voter.next + ahead
                if at < len(voter.text.tokens):
                    voter.token = voter.text.tokens[at]
                elif voter.text is me and at_end:
                    voter.token = tokens[at - len(me.tokens)]
                else:
                    continue
                active.append(voter)
            shares = {}
            for voter in active:
                shares[voter.token] = shares.get(voter.token, 0.0) + voter.weight
            if not shares:
                break
            token = max(shares, key=shares.get)
            voters = [voter for voter in active if voter.token == token]
            leader = max(voters, key=lambda voter: voter.weight)
            first = first or leader
            prior = self.vote_prior * leader.weight
            others = max(0.0, sum(voter.weight for voter in active) - leader.weight)
            agreeing = max(0.0, shares[token] - leader.weight)
            prob = (agreeing + prior * self.prior(leader.source, leader.match + ahead)) / (others + prior)
            if path * prob < min_prob:
                break
            path *= prob
            score += path
            tokens.append(token)
            probs.append(prob)
        return tokens, probs, score, first

    def draft(self, key, max_tokens, min_prob, context=None):
        """(tokens, probs, match_length, source, votes, score)"""
        me = self.texts[key]
        at_end = context is None
        context = (me.tokens[me.first :] if at_end else context)[-self.max_match :]
        best = ([], [], 0, NO_SOURCE, 0, 0.0)
        if max_tokens == 0:
            return best
        for voters in self.candidates(me, context):
            if not voters:
                continue
            voters = self.weigh(me, voters)
            tokens, probs, score, first = self.vote(me, list(voters), max_tokens, min_prob, at_end)
            if score > best[5]:
                best = (tokens, probs, first.match, first.source, len(voters), score)
        return best
