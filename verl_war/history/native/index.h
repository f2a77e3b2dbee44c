// The index: segments of text, three chains of positions with equal last tokens, drafts by vote, eviction in slices.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "gate.h"
#include "heads.h"

namespace verl_war {

// In index.py: SOURCES, NO_SOURCE, NO_GROUP.
enum Source { kOwn = 0, kSiblings = 1, kEarlierSteps = 2, kGlobal = 3 };
constexpr int kNumSources = 4;
enum Chain { kOwnChain = 0, kGroupChain = 1, kGlobalChain = 2 };
constexpr int64_t kNoGroup = -1;
// Keys of callers are below; above are text of other replicas (key | kRemoteKeys) and retired text.
constexpr int64_t kKeyEnd = int64_t{1} << 60;
constexpr int64_t kRetiredKeys = int64_t{1} << 60;
constexpr int64_t kRemoteKeys = int64_t{1} << 61;
constexpr int kMaxGram = 8;       // largest min_match
constexpr int kMaxContext = 256;  // largest max_match_tokens

constexpr std::array<int, 12> kMatchBuckets = {1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49};
// Acceptance of a single match until it is measured: of scripted agents' text and of made-up text, rounded down.
constexpr std::array<float, 12> kPriorAcceptance = {0.15f, 0.2f,  0.35f, 0.6f, 0.65f, 0.75f,
                                                    0.8f,  0.85f, 0.85f, 0.9f, 0.9f,  0.95f};
int match_bucket(int match_length);

struct UnknownKey : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Options {
    int64_t vocab_size;
    int64_t max_bytes;
    std::array<int, kNumChains> min_match;
    int max_match_tokens;
    int max_candidates;
    double age_decay;
    double vote_prior;
    uint32_t source_mask;
};

struct Segment {
    int64_t key = 0, group = kNoGroup, step = -1;
    uint64_t uid = 0;        // order of begin()
    uint64_t last_used = 0;  // tick of the latest draft that came from here
    // Offsets into the text of this segment, which begins at offset `origin` of the trajectory.
    int64_t length = 0;
    int64_t first = 0;        // kept text is [first, length)
    int64_t shared_from = 0;  // positions before are in the own chain only
    int64_t sent = 0;         // other replicas know [shared_from, sent)
    int64_t origin = 0;
    bool alive = false, live = false, frozen = false;
    bool remote = false;     // another replica generates it
    bool end_sent = false;   // other replicas know that it finished
    std::array<uint64_t, kNumChains> salt{};
    std::array<int64_t, kNumChains> indexed{};  // entries in each chain
    std::vector<uint32_t> pages;                // 0 where released
};

struct Drafts {
    std::vector<int64_t> offsets{0};
    std::vector<int32_t> tokens;
    std::vector<float> probs;
    std::vector<int32_t> match_length, source, votes;
    std::vector<float> score;
};

// New text on its way to another replica, row by row.
struct Deltas {
    std::vector<int64_t> key, group, step, start, offsets{0};
    std::vector<uint8_t> finished;
    std::vector<int32_t> tokens;
};
enum class Ingested : int32_t { kApplied = 0, kDuplicate = 1, kGap = 2, kConflict = 3, kRefused = 4 };

struct Stats {
    int64_t bytes, tokens, segments, live_segments, live_tokens, evicted_segments, evicted_tokens, refused_tokens,
        drafts, drafted_tokens;
};

// Not thread-safe: callers hold `gate` (see bindings.cpp). Checks throw before anything has changed.
class Index {
public:
    explicit Index(const Options& options);

    // segments.cpp
    void check_tokens(const int32_t* tokens, int64_t count) const;
    void begin(int64_t key, int64_t group, int64_t step, int64_t prompt_tokens);
    // Tokens of the row that are known already; throws on a gap, a difference, a finished segment.
    int64_t check_extend(int64_t key, int64_t start, const int32_t* tokens, int64_t count) const;
    void append(int64_t key, const int32_t* tokens, int64_t count);
    int64_t common_prefix(int64_t key, const int32_t* tokens, int64_t count) const;
    void finish(int64_t key);
    void drop(int64_t key);
    int64_t set_step(int64_t step, int64_t window_steps);
    const Segment& segment(int64_t key) const;
    bool contains(int64_t key) const { return slots_.count(key) != 0; }
    std::vector<int64_t> keys() const;
    // Text offset of the first difference, `count` when there is none.
    int64_t compare(const Segment& segment, int64_t at, const int32_t* tokens, int64_t count) const;
    void copy_text(const Segment& segment, int64_t start, int64_t end, int32_t* out) const;
    Stats stats() const;
    int64_t bytes() const;

    // exchange.cpp
    // Text of this replica's segments that was not taken yet.
    void take_new(int64_t max_tokens, int64_t max_rows, Deltas& out);
    // Makes room for one row of another replica's text; the last `fresh` of its tokens are then to be appended. Text that
    // does not continue what is known begins a new segment.
    Ingested prepare_ingest(int64_t key, int64_t group, int64_t step, int64_t start, const int32_t* tokens,
                            int64_t count, int64_t& fresh);
    // The segment lives on, finished, under a key of its own.
    void retire(int64_t key);
    // An empty segment for text that was saved; its key.
    int64_t begin_restored(int64_t group, int64_t step);

    // draft.cpp
    void set_acceptance(const float* table) {
        std::copy(table, table + acceptance_.size(), acceptance_.begin());
    }
    // Adds one row to `out`. A null context is the end of the segment.
    void draft(int64_t key, int max_tokens, double min_prob, const int32_t* context, int64_t context_tokens,
               Drafts& out);

    // collect.cpp
    // Some eviction work, about `units` links; false when nothing is left to do. `forced`: also when under max_bytes.
    bool collect(int64_t units, bool forced);
    // Every head and link leads to text that is kept; throws std::logic_error otherwise. For tests, between collections.
    void check() const;

    const Options options;
    Gate gate;

private:
    friend class Drafter;

    // hashing and chains: chains.cpp
    uint64_t gram_hash(int chain, const int32_t* last, uint64_t salt) const;
    uint64_t hash_at(int chain, Position position) const;
    void index_block(Segment& segment, const int32_t* window, int64_t offset, int count);
    // Whether the entry can serve no draft of this chain.
    bool useless(int chain, Position position) const {
        const uint8_t state = arena_.state(position >> kPageShift);
        return state >= kDead || (chain == kOwnChain && state == kFinished);
    }
    bool doomed(Position position) const { return arena_.state(position >> kPageShift) == kDoomed; }
    Position link_of(int chain, Position position) const {
        return arena_.page(position >> kPageShift).link[chain][position & (kPageTokens - 1)];
    }
    Position skip_useless(int chain, Position position, int64_t& hops) const;
    Position skip_doomed(int chain, Position position, int64_t& hops) const;
    void grow_heads(int chain);
    void split(int chain, int count);
    bool merge_one(int chain);

    int64_t retired_key() { return kRetiredKeys + static_cast<int64_t>(retired_++); }
    Segment& live_segment(int64_t key);
    uint32_t slot_of(int64_t key) const;
    // Live text of this replica is never evicted. That of others is: word of its end may have been lost.
    static bool evictable(const Segment& segment) { return segment.alive && (!segment.live || segment.remote); }
    bool room_for_page() const { return bytes() < options.max_bytes + options.max_bytes / 4; }
    void kill(uint32_t slot);
    void kill_pages(Segment& segment, size_t end);

    bool start_cycle(bool forced);
    void choose_victims();
    bool cycle_step(int64_t& units);
    bool sweep_page(uint32_t id, int64_t& units);
    bool release_some(int64_t& units);

    Arena arena_;
    std::array<Heads, kNumChains> heads_;
    std::array<int64_t, kNumChains> entries_{};
    std::array<bool, kNumChains> chain_on_{};
    std::deque<Segment> segments_;  // deque: growing moves nothing
    std::vector<uint32_t> free_slots_;
    std::unordered_map<int64_t, uint32_t> slots_;
    std::vector<float> acceptance_;
    int64_t current_step_ = -1;
    uint64_t next_uid_ = 0, tick_ = 0, retired_ = 0;
    uint32_t take_at_ = 0;  // slot that take_new() looks at next
    int64_t tokens_ = 0, live_tokens_ = 0, live_segments_ = 0, remote_live_segments_ = 0, page_list_bytes_ = 0;
    int64_t evicted_segments_ = 0, evicted_tokens_ = 0, refused_tokens_ = 0, drafts_ = 0, drafted_tokens_ = 0;

    enum class Phase { kIdle, kHeads, kLinks, kRelease, kShrink };
    Phase phase_ = Phase::kIdle;
    int sweep_chain_ = 0;
    size_t sweep_at_ = 0;
    uint32_t sweep_link_ = 0;  // within the page at sweep_at_
    std::vector<uint32_t> dead_pages_, dead_slots_;  // since the current cycle began
    std::vector<uint32_t> doomed_slots_;             // released at the end of the current cycle
    bool own_stale_ = false;                             // a segment finished since the last cycle
};

}  // namespace verl_war
