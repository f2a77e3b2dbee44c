// Hashing of the last tokens, and the buckets: insert, split, merge.
#include "index.h"

namespace verl_war {

namespace {

constexpr int kLoad = 2;          // entries per bucket at which a table grows
constexpr int kBatch = 16;        // buckets split together, so that their cache misses overlap
constexpr int kMaxChain = 1024;   // entries of a bucket that a split or merge looks at; the older rest stays together
constexpr int kMaxDead = 1024;    // useless entries skipped in a row before the older rest of a bucket is given up

uint64_t mix(uint64_t value) {
    value ^= value >> 32;
    value *= 0xd6e8feb86659fd93ull;
    return value ^ (value >> 29);
}

}  // namespace

uint64_t Index::gram_hash(int chain, const int32_t* last, uint64_t salt) const {
    uint64_t hash = salt;
    for (int k = 0; k < options.min_match[chain]; ++k) {
        hash = (hash ^ static_cast<uint32_t>(last[-k])) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 31;
    }
    return mix(hash);
}

uint64_t Index::hash_at(int chain, Position position) const {
    const uint32_t id = position >> kPageShift, offset = position & (kPageTokens - 1);
    const PageInfo& info = arena_.info(id);
    const Segment& segment = segments_[info.segment];
    const int gram = options.min_match[chain];
    const Page& page = arena_.page(id);
    if (static_cast<int>(offset) + 1 >= gram) return gram_hash(chain, &page.token[offset], segment.salt[chain]);
    int32_t tokens[kMaxGram];
    const uint32_t before_id = segment.pages[info.ordinal - 1];
    if (before_id == 0) return 0;
    const Page& before = arena_.page(before_id);
    for (int k = 0; k < gram; ++k) {
        const int at = static_cast<int>(offset) - k;
        tokens[kMaxGram - 1 - k] = at >= 0 ? page.token[at] : before.token[static_cast<int>(kPageTokens) + at];
    }
    return gram_hash(chain, &tokens[kMaxGram - 1], segment.salt[chain]);
}

// window[0] is the token at `offset`; the up to kMaxGram - 1 tokens before it lie at negative indices.
void Index::index_block(Segment& segment, const int32_t* window, int64_t offset, int count) {
    for (int chain = 0; chain < kNumChains; ++chain) {
        if (!chain_on_[chain] || (chain == kGroupChain && segment.group == kNoGroup)) continue;
        const int64_t from = chain == kOwnChain ? 0 : segment.shared_from;
        const int64_t first = std::max<int64_t>(std::max<int64_t>(from, options.min_match[chain] - 1) - offset, 0);
        Heads& heads = heads_[chain];
        size_t buckets[kPageTokens];
        for (int64_t i = first; i < count; ++i) {
            buckets[i] = heads.bucket_of(gram_hash(chain, window + i, segment.salt[chain]));
            __builtin_prefetch(&heads.at(buckets[i]), 1);
        }
        const uint32_t id = segment.pages[offset >> kPageShift];
        Position* links = arena_.page(id).link[chain];
        const bool sweeping = phase_ != Phase::kIdle;
        for (int64_t i = first; i < count; ++i) {
            Position& head = heads.at(buckets[i]);
            const uint32_t at = static_cast<uint32_t>(offset + i) & (kPageTokens - 1);
            int64_t hops = 0;
            links[at] = sweeping ? skip_useless(chain, head, hops) : head;
            head = id << kPageShift | at;
        }
        const int64_t added = std::max<int64_t>(count - first, 0);
        entries_[chain] += added;
        segment.indexed[chain] += added;
        grow_heads(chain);
    }
}

Position Index::skip_useless(int chain, Position position, int64_t& hops) const {
    for (int i = 0; position != 0 && useless(chain, position); ++i, ++hops) {
        if (i == kMaxDead) return 0;
        position = link_of(chain, position);
    }
    return position;
}

Position Index::skip_doomed(int chain, Position position, int64_t& hops) const {
    for (int i = 0; position != 0 && doomed(position); ++i, ++hops) {
        if (i == kMaxDead) return 0;
        position = link_of(chain, position);
    }
    return position;
}

void Index::grow_heads(int chain) {
    Heads& heads = heads_[chain];
    while (entries_[chain] > kLoad * static_cast<int64_t>(heads.buckets() + kBatch)) split(chain, kBatch);
}

// Splits the next `count` buckets, in step, dropping useless entries; both halves keep their order.
void Index::split(int chain, int count) {
    Heads& heads = heads_[chain];
    heads.ensure_room(count);
    struct Cursor {
        Position at;
        Position* low;
        Position* high;
        Position* latest;
        uint64_t bit;
    } cursors[kBatch];
    for (int i = 0; i < count; ++i) {
        const size_t low = heads.split_bucket(), high = heads.buckets();
        heads.at(high) = 0;
        cursors[i] = {heads.at(low), &heads.at(low), &heads.at(high), &heads.at(low), heads.split_bit()};
        heads.grown();
    }
    bool more = true;
    for (int round = 0; more && round < kMaxChain; ++round) {
        for (int i = 0; i < count; ++i) {
            if (cursors[i].at == 0) continue;
            Page& page = arena_.page(cursors[i].at >> kPageShift);
            __builtin_prefetch(&page.token[cursors[i].at & (kPageTokens - 1)]);
            __builtin_prefetch(&page.link[chain][cursors[i].at & (kPageTokens - 1)], 1);
        }
        more = false;
        for (int i = 0; i < count; ++i) {
            Cursor& cursor = cursors[i];
            const Position position = cursor.at;
            if (position == 0) continue;
            Position* link = &arena_.page(position >> kPageShift).link[chain][position & (kPageTokens - 1)];
            cursor.at = *link;
            more |= cursor.at != 0;
            if (useless(chain, position)) continue;
            Position*& tail = hash_at(chain, position) & cursor.bit ? cursor.high : cursor.low;
            *tail = position;
            tail = link;
            cursor.latest = link;
        }
    }
    for (int i = 0; i < count; ++i) {
        int64_t hops = 0;
        const Position rest = skip_useless(chain, cursors[i].at, hops);
        *cursors[i].low = *cursors[i].high = 0;
        // What was not looked at stays with the half of the entry before: a long run of one key stays whole.
        *(cursors[i].latest == cursors[i].high ? cursors[i].high : cursors[i].low) = rest;
    }
}

// Undoes one split when the table is far too large; the entries of the upper half go behind those of the lower.
bool Index::merge_one(int chain) {
    Heads& heads = heads_[chain];
    if (heads.buckets() <= Heads::kMinBuckets || entries_[chain] >= static_cast<int64_t>(heads.buckets())) {
        return false;
    }
    const size_t low = heads.shrink();
    const Position upper = heads.at(heads.buckets());
    heads.at(heads.buckets()) = 0;
    Position* tail = &heads.at(low);
    for (int i = 0; *tail != 0 && upper != 0 && i < kMaxChain; ++i) {
        tail = &arena_.page(*tail >> kPageShift).link[chain][*tail & (kPageTokens - 1)];
    }
    if (upper != 0) *tail = upper;
    return true;
}

}  // namespace verl_war
