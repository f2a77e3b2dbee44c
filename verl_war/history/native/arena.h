// Token storage in 4 KiB pages that go back to the operating system one by one.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <vector>

namespace verl_war {

constexpr uint32_t kPageShift = 8;
constexpr uint32_t kPageTokens = 1u << kPageShift;
constexpr int kNumChains = 3;

// A position is page << kPageShift | offset; 0 means none, so page 0 is never handed out.
using Position = uint32_t;

// Text and, per chain, the previous position of the same bucket. One memory page, so that freeing it frees memory.
struct Page {
    int32_t token[kPageTokens];
    Position link[kNumChains][kPageTokens];
};
static_assert(sizeof(Page) == 4096, "a page must be one memory page");

// Finished: of a segment that runs no more, so out of the own chain. Dead: its text is forgotten. Doomed: dead since
// before the current cycle of eviction began, and released at its end.
enum PageState : uint8_t { kFree, kUsed, kFinished, kDead, kDoomed };

struct PageInfo {
    uint32_t segment = 0;  // slot of the owner
    uint32_t ordinal = 0;  // the page holds offsets [ordinal * kPageTokens, ...) of its text
    uint32_t used = 0;     // tokens written
};

class Arena {
public:
    Arena() { grow_tables(kChunkPages); next_ = 1; }
    ~Arena() {
        for (Page* chunk : chunks_) munmap(chunk, kChunkPages * sizeof(Page));
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    Page& page(uint32_t id) { return chunks_[id / kChunkPages][id % kChunkPages]; }
    const Page& page(uint32_t id) const { return chunks_[id / kChunkPages][id % kChunkPages]; }
    PageInfo& info(uint32_t id) { return info_[id]; }
    const PageInfo& info(uint32_t id) const { return info_[id]; }
    uint8_t state(uint32_t id) const { return state_[id]; }
    void set_state(uint32_t id, PageState state) { state_[id] = state; }
    uint32_t end() const { return next_; }
    int64_t pages_in_use() const { return in_use_; }
    int64_t table_bytes() const {
        return static_cast<int64_t>(info_.capacity() * sizeof(PageInfo) + state_.capacity() + free_.capacity() * 4);
    }

    // Throws std::bad_alloc when the operating system or the 32-bit positions give out; nothing has changed then.
    uint32_t allocate(uint32_t segment, uint32_t ordinal) {
        uint32_t id;
        if (!free_.empty()) {
            id = free_.back();
            free_.pop_back();
        } else {
            if (next_ >= kMaxPages) throw std::bad_alloc();
            if (next_ / kChunkPages >= chunks_.size()) add_chunk();
            id = next_++;
        }
        info_[id] = PageInfo{segment, ordinal, 0};
        state_[id] = kUsed;
        ++in_use_;
        return id;
    }

    // Give back `count` pages with consecutive ids; their content is zero when next used.
    void release(uint32_t first, uint32_t count) {
        for (uint32_t id = first; id < first + count;) {
            uint32_t run = kChunkPages - id % kChunkPages;
            if (run > first + count - id) run = first + count - id;
            madvise(&page(id), run * sizeof(Page), MADV_DONTNEED);
            id += run;
        }
        for (uint32_t id = first + count; id-- > first;) {
            state_[id] = kFree;
            free_.push_back(id);
        }
        in_use_ -= count;
    }

private:
    static constexpr uint32_t kChunkPages = 256;
    static constexpr uint32_t kMaxPages = 1u << (32 - kPageShift);

    void grow_tables(size_t pages) {
        info_.resize(pages);
        state_.resize(pages, kFree);
        free_.reserve(pages);  // so that release() never allocates
    }

    void add_chunk() {
        grow_tables((chunks_.size() + 1) * kChunkPages);
        chunks_.reserve(chunks_.size() + 1);
        void* memory = mmap(nullptr, kChunkPages * sizeof(Page), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        chunks_.push_back(static_cast<Page*>(memory));
    }

    std::vector<Page*> chunks_;
    std::vector<PageInfo> info_;
    std::vector<uint8_t> state_;  // apart from info_: looked at for every link when links are swept
    std::vector<uint32_t> free_;
    uint32_t next_ = 1;
    int64_t in_use_ = 0;
};

}  // namespace verl_war
