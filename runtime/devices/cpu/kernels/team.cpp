#include "team.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace team {

namespace {

constexpr int64_t SPIN_NS = 60'000;  // how long a thread waits awake for the next work
constexpr int PAUSES_PER_CHECK = 64;
constexpr uint64_t CLOSED = 0x7fffffff;  // more chunks than any phase has

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// One phase of the work at hand. `ticket` holds the number of the work in its upper half, so that a thread that still
// looks at an older one takes nothing of this.
struct alignas(64) Phase {
    std::atomic<uint64_t> ticket{0};
    std::atomic<int> num_chunks{0};
    std::atomic<int> num_done{0};
};

}  // namespace

class Team {
  public:
    explicit Team(int count) : count_(count), phases_(new Phase[MAX_PHASES]) {
        for (int i = 1; i < count; i++) {
            helpers_[i] = {this, i};
            if (pthread_create(&threads_[i], nullptr, &Team::help, &helpers_[i]) != 0) {
                count_ = i;
                break;
            }
        }
    }

    ~Team() {
        is_ending_.store(true);
        number_.fetch_add(1);
        futex_wake_all(&number_);
        for (int i = 1; i < count_; i++) pthread_join(threads_[i], nullptr);
        delete[] phases_;
    }

    int count() const { return count_; }

    void run(Work* work) {
        int num_phases = work->num_phases();
        uint32_t number = number_.load(std::memory_order_relaxed) + 1;
        work_.store(work, std::memory_order_relaxed);
        num_phases_.store(num_phases, std::memory_order_relaxed);
        for (int i = 0; i < num_phases; i++) {
            // A thread of the last work may look at this phase: its ticket is closed before anything else changes.
            phases_[i].ticket.store((uint64_t)number << 32 | CLOSED, std::memory_order_release);
            phases_[i].num_chunks.store(work->num_chunks(i), std::memory_order_release);
            phases_[i].num_done.store(0, std::memory_order_release);
            phases_[i].ticket.store((uint64_t)number << 32, std::memory_order_release);
        }
        number_.store(number, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&number_);
        compute(work, num_phases, number, 0);
    }

  private:
    struct Helper {
        Team* team;
        int index;
    };

    static void* help(void* argument) {
        auto* helper = static_cast<Helper*>(argument);
        helper->team->loop(helper->index);
        return nullptr;
    }

    void loop(int thread) {
        uint32_t seen = 0;
        while (true) {
            uint32_t number = wait_for_work(seen);
            if (is_ending_.load()) return;
            seen = number;
            Work* work = work_.load(std::memory_order_relaxed);
            compute(work, num_phases_.load(std::memory_order_relaxed), number, thread);
        }
    }

    // Awake for SPIN_NS, then asleep.
    uint32_t wait_for_work(uint32_t seen) {
        int64_t until = now_ns() + SPIN_NS;
        while (true) {
            for (int i = 0; i < PAUSES_PER_CHECK; i++) {
                uint32_t number = number_.load(std::memory_order_acquire);
                if (number != seen) return number;
                pause_cpu();
            }
            if (now_ns() < until) continue;
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            if (number_.load(std::memory_order_seq_cst) == seen) futex_wait(&number_, seen);
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    // Takes chunks until all phases are done, or until the work is no longer this one.
    void compute(Work* work, int num_phases, uint32_t number, int thread) {
        for (int i = 0; i < num_phases; i++) {
            Phase& phase = phases_[i];
            // A single chunk is the caller's: another thread may have lost its core when it has taken it.
            bool helps = thread == 0 || phase.num_chunks.load(std::memory_order_acquire) > 1;
            int chunk;
            while (helps && (chunk = take(phase, number)) >= 0) {
                work->compute(i, chunk, thread);
                phase.num_done.fetch_add(1, std::memory_order_release);
            }
            if (!wait_for_chunks(phase, number)) return;
        }
    }

    // The next chunk; -1: there is none left, or the work is over.
    int take(Phase& phase, uint32_t number) {
        uint64_t ticket = phase.ticket.load(std::memory_order_acquire);
        while (ticket >> 32 == number) {
            int chunk = (int)(uint32_t)ticket;
            if (chunk >= phase.num_chunks.load(std::memory_order_acquire)) return -1;
            if (phase.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) return chunk;
        }
        return -1;
    }

    // Until all chunks of the phase are done. False: the work is over.
    bool wait_for_chunks(Phase& phase, uint32_t number) {
        for (int spins = 0;; spins++) {
            if (phase.ticket.load(std::memory_order_acquire) >> 32 != number) return false;
            if (phase.num_done.load(std::memory_order_acquire) >= phase.num_chunks.load(std::memory_order_relaxed))
                return phase.ticket.load(std::memory_order_acquire) >> 32 == number;
            pause_cpu();
            if (spins % 4096 == 4095) sched_yield_now();  // the thread that holds the chunk may need this core
        }
    }

    static void sched_yield_now() { syscall(SYS_sched_yield); }

    int count_;
    Phase* phases_;
    alignas(64) std::atomic<uint32_t> number_{0};  // of the work at hand
    std::atomic<Work*> work_{nullptr};
    std::atomic<int> num_phases_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> is_ending_{false};
    pthread_t threads_[MAX_THREADS];
    Helper helpers_[MAX_THREADS];
};

Team* start(int num_threads) {
    return new Team(num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads);
}

void stop(Team* team) { delete team; }

int num_threads(const Team* team) { return team->count(); }

void run(Team* team, Work* work) { team->run(work); }

}  // namespace team
