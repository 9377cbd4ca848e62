// What hybridc.h calls a session: a bundle that is ready to run.
#pragma once
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "hybridc.h"
#include "library.h"
#include "loaded_plan.h"
#include "program/program.h"
#include "system/files.h"

namespace hybridc {

class Session {
 public:
  // Throws Refusal.
  static std::unique_ptr<Session> Open(const std::string& folder, const hybridc_options& options);

  const Program& program() const { return program_; }
  hybridc_memory Memory() const;

  void Run(std::span<const hybridc_input_array> inputs, std::span<hybridc_output_array> outputs);

  const Plan& plan() const { return plan_->plan(); }

  // How many run the CPU's kernels.
  int threads() const { return threads_; }

  // `times` has room for all steps.
  void Measure(std::span<const hybridc_input_array> inputs, hybridc_step* times);

 private:
  // The arrays of a run by the number of their input.
  using Feeds = std::vector<const hybridc_input_array*>;

  Session(const std::string& folder, Program program, std::unique_ptr<File> weights, const Library& library,
          const hybridc_options& options);

  const Plan& ChoosePlan(const hybridc_options& options) const;
  Feeds Checked(std::span<const hybridc_input_array> inputs) const;
  void PutInputs(const Feeds& feeds);
  void Fill(size_t number, const Feeds& feeds, hybridc_output_array& output) const;
  int64_t CountOf(size_t number, const Feeds& feeds) const;
  // What an output, or a count behind them, is after a run.
  void Fetch(size_t number, const Feeds& feeds, void* data) const;
  void FetchBytes(const Place& place, int64_t begin, int64_t size_bytes, const Feeds& feeds, char* data) const;

  const std::string folder_;
  const Program program_;
  const std::unique_ptr<File> weights_;
  const Library library_;
  const int threads_;
  const std::unique_ptr<LoadedPlan> plan_;
  std::mutex mutex_;
};

}  // namespace hybridc
