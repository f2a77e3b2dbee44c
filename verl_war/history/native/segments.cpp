// Life of a segment: begin, append, finish, forget; and what can be asked of it.
#include <algorithm>

#include "index.h"

namespace verl_war {

namespace {

constexpr int kBlock = 32;  // tokens indexed together, so that the cache misses of their heads overlap

std::string number(int64_t value) { return std::to_string(value); }

uint64_t salt_of(uint64_t kind, uint64_t value) {
    value += (kind + 1) * 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

}  // namespace

Index::Index(const Options& given) : options(given) {
    const uint32_t mask = options.source_mask;
    chain_on_ = {(mask & 1u << kOwn) != 0, (mask & (1u << kSiblings | 1u << kEarlierSteps)) != 0,
                 (mask & 1u << kGlobal) != 0};
    for (int source = 0; source < kNumSources; ++source) {
        acceptance_.insert(acceptance_.end(), kPriorAcceptance.begin(), kPriorAcceptance.end());
    }
}

void Index::check_tokens(const int32_t* tokens, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
        if (tokens[i] < 0 || tokens[i] >= options.vocab_size) {
            throw std::invalid_argument("tokens[" + number(i) + "]=" + number(tokens[i]) +
                                        " is outside the vocabulary: expected 0 to " + number(options.vocab_size - 1));
        }
    }
}

uint32_t Index::slot_of(int64_t key) const {
    const auto found = slots_.find(key);
    if (found == slots_.end()) {
        throw UnknownKey("key=" + number(key) + " is not in the history; begin() it first (it may have been evicted)");
    }
    return found->second;
}

const Segment& Index::segment(int64_t key) const { return segments_[slot_of(key)]; }

Segment& Index::live_segment(int64_t key) {
    Segment& segment = segments_[slot_of(key)];
    if (!segment.live) throw std::invalid_argument("key=" + number(key) + " is finished; expected a live segment");
    return segment;
}

void Index::begin(int64_t key, int64_t group, int64_t step, int64_t prompt_tokens) {
    if (key < 0) throw std::invalid_argument("key=" + number(key) + " must be 0 or more");
    if (group < kNoGroup) throw std::invalid_argument("group=" + number(group) + " must be 0 or more, or -1 for none");
    if (step < -1) throw std::invalid_argument("step=" + number(step) + " must be 0 or more, or -1 when unknown");
    if (contains(key)) throw std::invalid_argument("key=" + number(key) + " exists already; drop() it or extend() it");
    uint32_t slot;
    if (free_slots_.empty()) {
        slot = static_cast<uint32_t>(segments_.size());
        segments_.emplace_back();
    } else {
        slot = free_slots_.back();
        free_slots_.pop_back();
    }
    Segment& segment = segments_[slot];
    segment = Segment{};
    segment.key = key;
    segment.group = group;
    segment.step = step;
    segment.uid = next_uid_++;
    segment.last_used = ++tick_;
    segment.shared_from = segment.sent = std::max<int64_t>(0, prompt_tokens - options.max_match_tokens);
    segment.alive = segment.live = true;
    segment.salt = {salt_of(kOwnChain, segment.uid), salt_of(kGroupChain, static_cast<uint64_t>(group)),
                    salt_of(kGlobalChain, 0)};
    slots_.emplace(key, slot);
    ++live_segments_;
}

int64_t Index::check_extend(int64_t key, int64_t start, const int32_t* tokens, int64_t count) const {
    const Segment& segment = segments_[slot_of(key)];
    const std::string name = "key=" + number(key);
    if (!segment.live) throw std::invalid_argument(name + " is finished; expected a live segment");
    if (start == -1 || segment.frozen) return 0;
    const int64_t end = segment.origin + segment.length;
    if (start < segment.origin || start > end) {
        throw std::invalid_argument("start=" + number(start) + " of " + name + " leaves a gap: expected " +
                                    number(segment.origin) + " to " + number(end) + ", the length that is known");
    }
    const int64_t known = std::min(end - start, count);
    const int64_t same = compare(segment, start - segment.origin, tokens, known);
    if (same < known) {
        throw std::invalid_argument("tokens[" + number(same) + "]=" + number(tokens[same]) + " of " + name +
                                    " differs from the token known at offset " + number(start + same) +
                                    ": the context was edited; drop() and begin() again");
    }
    return known;
}

void Index::append(int64_t key, const int32_t* tokens, int64_t count) {
    Segment& segment = live_segment(key);
    const uint32_t slot = slot_of(key);
    int32_t buffer[kMaxGram - 1 + kBlock];
    int32_t* window = buffer + kMaxGram - 1;
    for (int64_t done = 0; done < count;) {
        const uint32_t offset = segment.length & (kPageTokens - 1);
        if (offset == 0 && segment.pages.size() == static_cast<size_t>(segment.length >> kPageShift)) {
            if (segment.frozen || !room_for_page()) {
                segment.frozen = true;
                refused_tokens_ += count - done;
                return;
            }
            const size_t before = segment.pages.capacity();
            if (segment.pages.size() == before) segment.pages.reserve(std::max<size_t>(4, 2 * before));
            page_list_bytes_ += static_cast<int64_t>((segment.pages.capacity() - before) * sizeof(uint32_t));
            segment.pages.push_back(arena_.allocate(slot, static_cast<uint32_t>(segment.pages.size())));
        }
        const int block = static_cast<int>(
            std::min<int64_t>({count - done, kBlock, static_cast<int64_t>(kPageTokens - offset)}));
        for (int64_t k = 1; k < kMaxGram; ++k) {
            const int64_t at = segment.length - k;
            window[-k] = at < 0 ? 0 : arena_.page(segment.pages[at >> kPageShift]).token[at & (kPageTokens - 1)];
        }
        const uint32_t id = segment.pages.back();
        std::copy(tokens + done, tokens + done + block, window);
        std::copy(tokens + done, tokens + done + block, &arena_.page(id).token[offset]);
        arena_.info(id).used = offset + block;
        const int64_t at = segment.length;
        segment.length += block;
        tokens_ += block;
        live_tokens_ += block;
        index_block(segment, window, at, block);
        done += block;
    }
}

int64_t Index::common_prefix(int64_t key, const int32_t* tokens, int64_t count) const {
    const Segment& kept = segment(key);
    if (kept.first > 0 || kept.origin > 0) return 0;
    return compare(kept, 0, tokens, std::min(count, kept.length));
}

int64_t Index::compare(const Segment& segment, int64_t begin, const int32_t* tokens, int64_t count) const {
    for (int64_t i = 0; i < count;) {
        const int64_t at = begin + i;
        const int32_t* page = arena_.page(segment.pages[at >> kPageShift]).token;
        const int64_t from = at & (kPageTokens - 1), here = std::min<int64_t>(count - i, kPageTokens - from);
        const int32_t* differs = std::mismatch(page + from, page + from + here, tokens + i).first;
        i += differs - (page + from);
        if (differs != page + from + here) return i;
    }
    return count;
}

void Index::finish(int64_t key) {
    Segment& segment = live_segment(key);
    segment.live = false;
    --live_segments_;
    remote_live_segments_ -= segment.remote;
    live_tokens_ -= segment.length;
    segment.last_used = ++tick_;
    // The own chain serves only the running trajectory, and siblings have the same prompt.
    entries_[kOwnChain] -= segment.indexed[kOwnChain];
    segment.indexed[kOwnChain] = 0;
    own_stale_ = true;
    for (uint32_t id : segment.pages) arena_.set_state(id, kFinished);
    const size_t released = static_cast<size_t>(segment.shared_from >> kPageShift);
    kill_pages(segment, std::min(released, segment.pages.size()));
}

void Index::kill_pages(Segment& segment, size_t end) {
    for (size_t i = static_cast<size_t>(segment.first >> kPageShift); i < end; ++i) {
        arena_.set_state(segment.pages[i], kDead);
        dead_pages_.push_back(segment.pages[i]);
        const int64_t used = arena_.info(segment.pages[i]).used;
        tokens_ -= used;
        segment.first += used;
        segment.pages[i] = 0;
    }
}

void Index::kill(uint32_t slot) {
    Segment& segment = segments_[slot];
    if (segment.live) {
        --live_segments_;
        remote_live_segments_ -= segment.remote;
        live_tokens_ -= segment.length;
    }
    for (int chain = 0; chain < kNumChains; ++chain) entries_[chain] -= segment.indexed[chain];
    slots_.erase(segment.key);
    segment.alive = segment.live = false;
    kill_pages(segment, segment.pages.size());
    page_list_bytes_ -= static_cast<int64_t>(segment.pages.capacity() * sizeof(uint32_t));
    dead_slots_.push_back(slot);
}

void Index::drop(int64_t key) { kill(slot_of(key)); }

int64_t Index::set_step(int64_t step, int64_t window_steps) {
    if (step < 0) throw std::invalid_argument("step=" + number(step) + " must be 0 or more");
    if (window_steps < 0) throw std::invalid_argument("window_steps=" + number(window_steps) + " must be 0 or more");
    current_step_ = step;
    int64_t count = 0;
    for (uint32_t slot = 0; slot < segments_.size(); ++slot) {
        Segment& segment = segments_[slot];
        if (!evictable(segment)) continue;
        // Text of a later step is of an earlier run: it must not outlive the text of this one.
        segment.step = std::min(segment.step, step);
        if (segment.step < 0 || segment.step >= step - window_steps) continue;
        ++evicted_segments_;
        evicted_tokens_ += segment.length - segment.first;
        kill(slot);
        ++count;
    }
    return count;
}

std::vector<int64_t> Index::keys() const {
    std::vector<std::pair<uint64_t, int64_t>> order;
    for (const auto& entry : slots_) order.emplace_back(segments_[entry.second].uid, entry.first);
    std::sort(order.begin(), order.end());
    std::vector<int64_t> keys;
    for (const auto& entry : order) keys.push_back(entry.second);
    return keys;
}

void Index::copy_text(const Segment& segment, int64_t start, int64_t end, int32_t* out) const {
    for (int64_t at = start; at < end;) {
        const int64_t stop = std::min<int64_t>(end, (at | (kPageTokens - 1)) + 1);
        const int32_t* page = arena_.page(segment.pages[at >> kPageShift]).token;
        const int64_t from = at & (kPageTokens - 1);
        out = std::copy(page + from, page + from + (stop - at), out);
        at = stop;
    }
}

int64_t Index::bytes() const {
    int64_t bytes = arena_.pages_in_use() * static_cast<int64_t>(sizeof(Page)) + arena_.table_bytes() +
                    static_cast<int64_t>(segments_.size() * (sizeof(Segment) + 4 * sizeof(void*))) + page_list_bytes_;
    for (const Heads& heads : heads_) bytes += heads.bytes();
    return bytes;
}

Stats Index::stats() const {
    return {bytes(), tokens_, static_cast<int64_t>(slots_.size()), live_segments_, live_tokens_, evicted_segments_,
            evicted_tokens_, refused_tokens_, drafts_, drafted_tokens_};
}

}  // namespace verl_war
