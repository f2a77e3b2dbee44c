// Eviction: whole segments die at once; then heads and links are swept in slices, so that none leads into a dead page
// when the dead pages go back to the operating system.
#include <algorithm>

#include "index.h"

namespace verl_war {

namespace {

constexpr int64_t kUnitsPerHop = 16;  // a hop is a cache miss; a link that the sweep looks at is not
constexpr double kLowWater = 0.9;  // evict to this share of max_bytes, so that sweeps are rare

}  // namespace

bool Index::collect(int64_t units, bool forced) {
    if (phase_ == Phase::kIdle && !start_cycle(forced)) return false;
    while (units > 0 && phase_ != Phase::kIdle) {
        if (!cycle_step(units)) return true;
    }
    return true;
}

// Marks what goes. False when there is nothing to do.
bool Index::start_cycle(bool forced) {
    const int64_t own_live = live_segments_ - remote_live_segments_;
    if (bytes() > options.max_bytes && static_cast<int64_t>(slots_.size()) > own_live) choose_victims();
    const bool something = !dead_pages_.empty() || !dead_slots_.empty();
    if (!(forced ? something || own_stale_ : something && bytes() > options.max_bytes)) return false;
    for (uint32_t id : dead_pages_) arena_.set_state(id, kDoomed);
    dead_pages_.clear();
    doomed_slots_.swap(dead_slots_);
    own_stale_ = false;
    phase_ = Phase::kHeads;
    sweep_chain_ = 0;
    sweep_at_ = 0;
    return true;
}

// Finished segments and those of other replicas, oldest policy step first, then least recently used.
void Index::choose_victims() {
    struct Victim {
        int64_t step;
        uint64_t last_used;
        uint32_t slot;
        bool operator<(const Victim& other) const {  // heap: the first to go on top
            return step != other.step ? step > other.step : last_used > other.last_used;
        }
    };
    std::vector<Victim> heap;
    for (uint32_t slot = 0; slot < segments_.size(); ++slot) {
        const Segment& segment = segments_[slot];
        if (evictable(segment)) heap.push_back({segment.step, segment.last_used, slot});
    }
    std::make_heap(heap.begin(), heap.end());
    const double target = kLowWater * static_cast<double>(options.max_bytes);
    const double per_page = static_cast<double>(bytes()) / std::max<int64_t>(1, arena_.pages_in_use());
    while (!heap.empty()) {
        const double kept = static_cast<double>(arena_.pages_in_use() - static_cast<int64_t>(dead_pages_.size()));
        if (kept * per_page <= target) return;
        std::pop_heap(heap.begin(), heap.end());
        Segment& segment = segments_[heap.back().slot];
        ++evicted_segments_;
        evicted_tokens_ += segment.length - segment.first;
        kill(heap.back().slot);
        heap.pop_back();
    }
}

// One small piece of the cycle; false when the cycle ended.
bool Index::cycle_step(int64_t& units) {
    switch (phase_) {
        case Phase::kHeads: {
            Heads& heads = heads_[sweep_chain_];
            const size_t stop = std::min(heads.buckets(), sweep_at_ + 256);
            --units;
            for (; sweep_at_ < stop && units > 0; ++sweep_at_) {
                Position& head = heads.at(sweep_at_);
                int64_t hops = 0;
                head = skip_useless(sweep_chain_, head, hops);
                units -= 1 + kUnitsPerHop * hops;
            }
            if (sweep_at_ < heads.buckets()) return true;
            sweep_at_ = 0;
            if (++sweep_chain_ == kNumChains) {
                phase_ = Phase::kLinks;
                sweep_at_ = 1;
                sweep_link_ = 0;
            }
            return true;
        }
        case Phase::kLinks:
            if (sweep_at_ < arena_.end()) {
                if (sweep_page(static_cast<uint32_t>(sweep_at_), units)) ++sweep_at_;
            } else {
                phase_ = Phase::kRelease;
                sweep_at_ = 1;
            }
            return true;
        case Phase::kRelease:
            if (release_some(units)) return true;
            for (uint32_t slot : doomed_slots_) {
                segments_[slot] = Segment{};
                free_slots_.push_back(slot);
            }
            doomed_slots_.clear();
            phase_ = Phase::kShrink;
            sweep_chain_ = 0;
            return true;
        case Phase::kShrink:
            for (int i = 0; i < 16; ++i) {
                if (merge_one(sweep_chain_)) {
                    units -= 8;
                    continue;
                }
                if (heads_[sweep_chain_].trim()) {
                    units -= 512;
                    return true;
                }
                if (++sweep_chain_ == kNumChains) {
                    phase_ = Phase::kIdle;
                    return false;
                }
            }
            return true;
        case Phase::kIdle:
            break;
    }
    return false;
}

// False when the units were used up before the end of the page; the next call goes on there.
bool Index::sweep_page(uint32_t id, int64_t& units) {
    units -= 2;
    const uint8_t state = arena_.state(id);
    if (state == kFree || state == kDoomed) {
        sweep_link_ = 0;
        return true;
    }
    const uint32_t used = arena_.info(id).used;
    for (; sweep_link_ < kNumChains * kPageTokens && units > 0; ++sweep_link_) {
        const int chain = static_cast<int>(sweep_link_ / kPageTokens);
        const uint32_t at = sweep_link_ % kPageTokens;
        if (at >= used) continue;
        Position& link = arena_.page(id).link[chain][at];
        --units;
        if (link == 0) continue;
        // Useless entries are skipped only from useful ones: every run of them is then walked once, from its front.
        // The others must still not lead into doomed pages, because a useful one may lead to them until the next cycle.
        const bool useful = state == kUsed || (state == kFinished && chain != kOwnChain);
        int64_t hops = 0;
        if (useful ? useless(chain, link) : doomed(link)) {
            link = useful ? skip_useless(chain, link, hops) : skip_doomed(chain, link, hops);
            units -= kUnitsPerHop * hops;
        }
    }
    if (sweep_link_ < kNumChains * kPageTokens) return false;
    sweep_link_ = 0;
    return true;
}

// Gives one run of doomed pages back; false when there are none left.
bool Index::release_some(int64_t& units) {
    while (sweep_at_ < arena_.end() && arena_.state(static_cast<uint32_t>(sweep_at_)) != kDoomed) {
        ++sweep_at_;
        if (--units <= 0) return true;
    }
    const uint32_t first = static_cast<uint32_t>(sweep_at_);
    uint32_t count = 0;
    while (count < 64 && first + count < arena_.end() && arena_.state(first + count) == kDoomed) ++count;
    if (count == 0) return false;
    arena_.release(first, count);
    sweep_at_ += count;
    units -= 256 + 64 * static_cast<int64_t>(count);
    return true;
}

void Index::check() const {
    int64_t kept = 0, in_use = 0;
    for (uint32_t id = 1; id < arena_.end(); ++id) in_use += arena_.state(id) != kFree;
    for (const Segment& segment : segments_) {
        for (uint32_t id : segment.pages) kept += id != 0 ? arena_.info(id).used : 0;
    }
    if (kept != tokens_) throw std::logic_error("tokens: " + std::to_string(kept) + " in pages, " +
                                                std::to_string(tokens_) + " counted");
    if (in_use != arena_.pages_in_use()) throw std::logic_error("pages in use are miscounted");
    for (int chain = 0; chain < kNumChains; ++chain) {
        const Heads& heads = heads_[chain];
        int64_t seen = 0;
        for (size_t bucket = 0; bucket < heads.buckets(); ++bucket) {
            for (Position at = heads.at(bucket); at != 0; at = link_of(chain, at)) {
                const uint32_t id = at >> kPageShift;
                if (id >= arena_.end() || arena_.state(id) == kFree) throw std::logic_error("a link into a free page");
                if ((at & (kPageTokens - 1)) >= arena_.info(id).used) throw std::logic_error("a link behind the text");
                if (!useless(chain, at)) ++seen;
                if (seen > entries_[chain]) throw std::logic_error("a chain holds more entries than were indexed");
            }
        }
    }
}

}  // namespace verl_war
