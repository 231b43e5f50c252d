// A team of threads that computes a list of phases, one after another, each in many small chunks.
//
// A thread that is free takes the next chunk of the current phase, so a thread that loses its core delays the others by the
// chunk that it holds and no more: none waits for threads, only for chunks. Between two lists threads spin for a
// bounded time and then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>

namespace team {

// What all threads do together: `num_phases` phases, of which the next begins when all chunks of the last are done.
class Work {
  public:
    virtual int num_phases() const = 0;
    virtual int num_chunks(int phase) const = 0;
    virtual void compute(int phase, int chunk, int thread) = 0;

  protected:
    ~Work() = default;  // works outlive their team, or it is told to forget them
};

constexpr int MAX_THREADS = 512;
constexpr int MAX_PHASES = 8192;

class Team;

// Starts `num_threads - 1` threads that help the caller of `run`.
Team* start(int num_threads);
void stop(Team* team);
int num_threads(const Team* team);

// Computes all phases of `work`; returns when the last chunk is done. One caller at a time.
void run(Team* team, Work* work);

// A loop as work of a team: its chunks in any order.
template <class Body> class Blocks final : public Work {
  public:
    Blocks(int count, Body body) : count_(count), body_(body) {}
    int num_phases() const override { return 1; }
    int num_chunks(int) const override { return count_; }
    void compute(int, int chunk, int) override { body_(chunk); }

  private:
    int count_;
    Body body_;
};

template <class Body> void for_blocks(Team* team, int count, Body body) {
    Blocks<Body> blocks(count, body);
    run(team, &blocks);
}

}  // namespace team
