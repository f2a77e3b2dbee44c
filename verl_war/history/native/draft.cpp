// Drafts: candidates from the chains, their match lengths, and the vote.
#include <algorithm>
#include <cmath>

#include "index.h"

namespace verl_war {

int match_bucket(int match_length) {
    const auto after = std::upper_bound(kMatchBuckets.begin(), kMatchBuckets.end(), std::max(match_length, 1));
    return static_cast<int>(after - kMatchBuckets.begin()) - 1;
}

namespace {

constexpr int kVisitsPerCandidate = 8;  // entries of a bucket looked at for every candidate wanted: other keys, dead text
constexpr int kLongMatch = 32;          // matches of this length are as good as any longer one ...
constexpr int kEnoughLong = 24;         // ... and of these so many are enough
constexpr int kLocalEnough = 16;        // with such a match in the own text or the group, other texts are not asked
constexpr int kMaxVoters = 24;          // best candidates that vote

struct Candidate {
    int match_length;
    int64_t step;
    uint64_t uid;
    int64_t next;  // offset of the token that followed
    Segment* segment;
    int source;
    double weight;
    int32_t token;  // its vote for the token at hand
};

// Who votes together: the own text, the samples of the same prompt, whichever step they are of, and all else. Siblings
// that voted alone, against earlier steps as a whole, drafted worse than earlier steps without them. Replay of scripted
// agents (8 tasks, third step, 8 at a time), accepted tokens a draft: without siblings 10.65, apart 10.38, together
// 10.73; with a tenth of the tokens at random 2.21, 2.17, 2.27, and 0.36 of the drafted tokens were accepted, not 0.33.
constexpr int kNumElectorates = 3;

int electorate_of(int source) { return source == kOwn ? 0 : source == kGlobal ? 2 : 1; }

bool better(const Candidate& a, const Candidate& b) {
    if (a.match_length != b.match_length) return a.match_length > b.match_length;
    if (a.step != b.step) return a.step > b.step;
    if (a.uid != b.uid) return a.uid > b.uid;
    return a.next > b.next;
}

struct Result {
    std::vector<int32_t> tokens;
    std::vector<float> probs;
    double score = 0.0;
    int source = -1;
    int match_length = 0;
    std::vector<Candidate> voters;
};

}  // namespace

class Drafter {
public:
    Drafter(Index& index, uint32_t slot, const int32_t* context, int length, bool at_end)
        : index_(index), self_(index.segments_[slot]), last_(context + length - 1), length_(length), at_end_(at_end) {}

    void find() {
        size_t buckets[kNumChains];
        bool on[kNumChains];
        for (int chain = 0; chain < kNumChains; ++chain) {
            on[chain] = index_.chain_on_[chain] && length_ >= index_.options.min_match[chain] &&
                        (chain != kGroupChain || self_.group != kNoGroup);
            if (!on[chain]) continue;
            const Heads& heads = index_.heads_[chain];
            buckets[chain] = heads.bucket_of(index_.gram_hash(chain, last_, self_.salt[chain]));
            __builtin_prefetch(&heads.at(buckets[chain]));
        }
        for (int chain = 0; chain < kNumChains; ++chain) {
            if (on[chain] && (chain != kGlobalChain || longest_ < kLocalEnough)) walk(chain, buckets[chain]);
        }
    }

    void walk(int chain, size_t bucket) {
        const int gram = index_.options.min_match[chain];
        Position at = index_.heads_[chain].at(bucket);
        const int wanted = index_.options.max_candidates;
        int found = 0, long_ones = 0;
        for (int visits = wanted * kVisitsPerCandidate; at != 0 && visits > 0; --visits) {
            const Position next = index_.link_of(chain, at);
            if (next != 0) {
                const Page& page = index_.arena_.page(next >> kPageShift);
                __builtin_prefetch(&page.link[chain][next & (kPageTokens - 1)]);
                __builtin_prefetch(&page.token[next & (kPageTokens - 1)]);
            }
            const int match_length = consider(chain, at, gram);
            at = next;
            if (match_length == 0) continue;
            longest_ = std::max(longest_, match_length);
            if (match_length >= kLongMatch && ++long_ones == kEnoughLong) return;
            if (++found == wanted) return;
        }
    }

    Result best(int max_tokens, double min_prob) {
        Result best, result;
        for (std::vector<Candidate>& found : candidates_) {
            if (found.empty()) continue;
            const size_t count = std::min<size_t>(found.size(), kMaxVoters);
            std::partial_sort(found.begin(), found.begin() + count, found.end(), better);
            found.resize(count);
            weigh(found);
            result = Result{};
            vote(found, max_tokens, min_prob, result);
            if (result.score > best.score) best = std::move(result);
        }
        return best;
    }

private:
    // Adds the position as a candidate; its match length, or 0 when it is none.
    int consider(int chain, Position at, int gram) {
        const uint32_t id = at >> kPageShift;
        const uint8_t state = index_.arena_.state(id);
        if (state == kFree || state >= kDead) return 0;
        const PageInfo& info = index_.arena_.info(id);
        Segment& segment = index_.segments_[info.segment];
        const bool own = &segment == &self_;
        const bool kin = self_.group != kNoGroup && segment.group == self_.group;
        int source;
        if (chain == kOwnChain) {
            if (!own || !self_.live) return 0;
            source = kOwn;
        } else if (chain == kGroupChain) {
            if (own || !kin) return 0;
            source = segment.step == self_.step ? kSiblings : kEarlierSteps;
        } else {
            if (own || kin) return 0;
            source = kGlobal;
        }
        if ((index_.options.source_mask & 1u << source) == 0) return 0;
        const int64_t offset = static_cast<int64_t>(info.ordinal) * kPageTokens + (at & (kPageTokens - 1));
        if (offset + 1 == segment.length) return 0;  // nothing follows
        const int match_length = match(segment, offset);
        if (match_length < gram) return 0;
        candidates_[electorate_of(source)].push_back(
            {match_length, segment.step, segment.uid, offset + 1, &segment, source, 0.0, 0});
        return match_length;
    }

    // Tokens up to and including `offset` that equal the end of the context.
    int match(const Segment& segment, int64_t offset) const {
        const int most = static_cast<int>(std::min<int64_t>(length_, offset - segment.first + 1));
        int length = 0;
        while (length < most) {
            const int64_t at = offset - length;
            const int32_t* token = &index_.arena_.page(segment.pages[at >> kPageShift]).token[at & (kPageTokens - 1)];
            const int here = std::min<int>(most - length, static_cast<int>(at & (kPageTokens - 1)) + 1);
            for (int k = 0; k < here; ++k, ++length) {
                if (token[-k] != last_[-length]) return length;
            }
        }
        return length;
    }

    // Weight = (share of the best match)^2 * decay^age; matches under half of the best do not vote.
    void weigh(std::vector<Candidate>& voters) const {
        const int best = voters.front().match_length;
        size_t count = 0;
        double most = 0.0;
        for (Candidate& voter : voters) {
            if (2 * voter.match_length < best) break;  // sorted
            const double share = static_cast<double>(voter.match_length) / best;
            const int64_t age = std::max<int64_t>(0, self_.step - voter.step);
            voter.weight = share * share * std::pow(index_.options.age_decay, static_cast<double>(age));
            most = std::max(most, voter.weight);
            ++count;
        }
        voters.resize(count);
        for (Candidate& voter : voters) voter.weight /= most;
    }

    // The token that followed the candidate's match after `ahead` more; false when its text ends there.
    bool vote_of(Candidate& voter, int ahead, const std::vector<int32_t>& drafted) const {
        const int64_t at = voter.next + ahead;
        const Segment& segment = *voter.segment;
        if (at < segment.length) {
            voter.token = index_.arena_.page(segment.pages[at >> kPageShift]).token[at & (kPageTokens - 1)];
            return true;
        }
        // A match that reaches into the draft itself, as in a text that repeats.
        if (&segment != &self_ || !at_end_) return false;
        voter.token = drafted[static_cast<size_t>(at - segment.length)];
        return true;
    }

    struct Leader {
        const Candidate* heaviest = nullptr;  // of those that vote for the leading token
        double agreeing = 0.0, total = 0.0;
    };

    static Leader leader_of(const std::vector<Candidate>& voters) {
        Leader leader;
        for (size_t i = 0; i < voters.size(); ++i) {
            leader.total += voters[i].weight;
            double sum = 0.0;
            const Candidate* heaviest = &voters[i];
            bool counted = false;
            for (size_t j = 0; j < voters.size() && !counted; ++j) {
                if (voters[j].token != voters[i].token) continue;
                counted = j < i;  // this token had its turn
                sum += voters[j].weight;
                if (voters[j].weight > heaviest->weight) heaviest = &voters[j];
            }
            if (!counted && sum > leader.agreeing) {
                leader.agreeing = sum;
                leader.heaviest = heaviest;
            }
        }
        return leader;
    }

    // Follows the majority. The first vote counts as the measured acceptance of its match, the others as evidence:
    // p = (W_t - w + a w p1) / (W - w + a w), w = heaviest vote for t, a = vote_prior; so p = p1 for a single match.
    void vote(std::vector<Candidate> voters, int max_tokens, double min_prob, Result& result) const {
        result.voters = voters;
        double path = 1.0;
        for (int ahead = 0; ahead < max_tokens; ++ahead) {
            const auto silent = [&](Candidate& voter) { return !vote_of(voter, ahead, result.tokens); };
            voters.erase(std::remove_if(voters.begin(), voters.end(), silent), voters.end());
            const Leader leader = leader_of(voters);
            if (leader.heaviest == nullptr) return;
            const double weight = leader.heaviest->weight, prior = index_.options.vote_prior * weight;
            if (ahead == 0) {
                result.source = leader.heaviest->source;
                result.match_length = leader.heaviest->match_length;
            }
            const float* accepted = &index_.acceptance_[leader.heaviest->source * kMatchBuckets.size()];
            const double single = accepted[match_bucket(leader.heaviest->match_length + ahead)];
            const double agreeing = std::max(0.0, leader.agreeing - weight);
            const double prob = (agreeing + prior * single) / (std::max(0.0, leader.total - weight) + prior);
            if (path * prob < min_prob) return;
            path *= prob;
            const int32_t token = leader.heaviest->token;
            result.score += path;
            result.tokens.push_back(token);
            result.probs.push_back(static_cast<float>(prob));
            const auto others = [token](const Candidate& voter) { return voter.token != token; };
            voters.erase(std::remove_if(voters.begin(), voters.end(), others), voters.end());
        }
    }

    Index& index_;
    Segment& self_;
    const int32_t* last_;
    int length_;
    bool at_end_;
    int longest_ = 0;
    std::vector<Candidate> candidates_[kNumElectorates];
};

void Index::draft(int64_t key, int max_tokens, double min_prob, const int32_t* context, int64_t context_tokens,
                  Drafts& out) {
    const uint32_t slot = slot_of(key);
    const Segment& self = segments_[slot];
    int32_t end[kMaxContext];
    const bool at_end = context == nullptr;
    const int64_t available = at_end ? self.length - self.first : context_tokens;
    const int length = static_cast<int>(std::min<int64_t>(available, options.max_match_tokens));
    Result result;
    if (max_tokens > 0 && length > 0 && !self.frozen) {
        if (at_end) {
            copy_text(self, self.length - length, self.length, end);
        } else {
            std::copy(context + context_tokens - length, context + context_tokens, end);
        }
        Drafter drafter(*this, slot, end, length, at_end);
        drafter.find();
        result = drafter.best(max_tokens, min_prob);
    }
    ++drafts_;
    drafted_tokens_ += static_cast<int64_t>(result.tokens.size());
    if (!result.voters.empty()) ++tick_;
    for (const Candidate& voter : result.voters) voter.segment->last_used = tick_;
    out.tokens.insert(out.tokens.end(), result.tokens.begin(), result.tokens.end());
    out.probs.insert(out.probs.end(), result.probs.begin(), result.probs.end());
    out.offsets.push_back(static_cast<int64_t>(out.tokens.size()));
    out.match_length.push_back(result.match_length);
    out.source.push_back(result.source);
    out.votes.push_back(static_cast<int32_t>(result.voters.size()));
    out.score.push_back(static_cast<float>(result.score));
}

}  // namespace verl_war
