// The command line: CLI11 fills the option structs, a command runs, its Status becomes one line and
// the exit code (0 done, 1 unexpected, 2 usage, 3 memory, 4 model or checkpoint, 5 device, 6 peer).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <map>

#include "apps/fathom/bench/bench.h"
#include "apps/fathom/command_line.h"
#include "apps/fathom/commands.h"
#include "apps/fathom/serve_flags.h"
#include "base/log.h"
#include "model/device_ceilings.h"

namespace fathom::app {
namespace {

using Run = std::function<Status()>;

constexpr std::pair<std::string_view, LoadFormat> kLoadFormats[] = {{"auto", LoadFormat::kAuto},
                                                                    {"dummy", LoadFormat::kDummy}};

template <typename Value>
void AddSeed(CLI::App* command, const char* name, Value* seed, const char* help) {
  AddNumber(command, name, seed, uint64_t{0}, UINT64_MAX, help);
}

void AddModelOptions(CLI::App* command, ModelOptions* options) {
  command->add_option("model", options->model, "model folder or Hugging Face repository name")
      ->required();
  AddChoice(command, "--device", &options->device, kDevices,
            "where it runs (default auto: on a GPU where there is one)");
  AddChoice(command, "--numerics", &options->numerics, kNumerics,
            "rounded as the official code does, or not at all (default official)");
  AddChoice(command, "--load-format", &options->load_format, kLoadFormats,
            "dummy: synthetic weights without files (default auto)");
  AddSeed(command, "--seed", &options->seed, "of dummy weights (default 0)");
  AddNumber(command, "--threads", &options->num_threads, 1, 1024,
            "CPU threads (default: all usable cores)");
  AddNumber(command, "--max-model-len", &options->max_model_len, int64_t{1}, int64_t{1} << 24,
            "longest prompt plus output");
  AddNumber(command, "--max-num-batched-tokens", &options->max_num_batched_tokens, 1, 1 << 20,
            "tokens of one step (default 8192 on a GPU, 2048 on a CPU)");
}

// A flag of the table to CLI11. Its values are applied when the command runs.
void AddServeFlag(CLI::App* command, const ServeFlag& flag,
                  std::map<std::string, std::vector<std::string>>* given) {
  const std::string note = flag.effect == FlagEffect::kNoEffect  ? "(accepted without effect) "
                           : flag.effect == FlagEffect::kRefused ? "(refused) "
                                                                 : "";
  if (flag.kind == FlagKind::kSwitch) {
    command->add_flag_callback(
        "--" + flag.name, [given, &flag] { (*given)[flag.name] = {"true"}; }, note + flag.help);
    if (flag.negatable) {
      command->add_flag_callback(
          "--no-" + flag.name, [given, &flag] { (*given)[flag.name] = {"false"}; }, "the opposite");
    }
    return;
  }
  CLI::Option* option =
      command->add_option("--" + flag.name, (*given)[flag.name], note + flag.help);
  // CLI11 says itself that there may be several.
  const std::string several = "…";
  option->type_name(flag.value_name.ends_with(several)
                        ? flag.value_name.substr(0, flag.value_name.size() - several.size())
                        : flag.value_name);
  if (flag.kind != FlagKind::kList) option->expected(1)->take_last();
}

Status ApplyServeFlags(const std::map<std::string, std::vector<std::string>>& given,
                       ServeOptions* options) {
  for (const ServeFlag& flag : ServeFlags()) {
    const auto it = given.find(flag.name);
    if (it == given.end() || it->second.empty()) continue;
    if (flag.apply) RETURN_IF_ERROR(flag.apply(it->second, *options));
    if (flag.effect == FlagEffect::kNoEffect) {
      LogInfo("--{} has no effect: {}", flag.name, flag.help);
    }
  }
  return OkStatus();
}

void AddServe(CLI::App* app, Run* run) {
  static ServeOptions options;
  static std::map<std::string, std::vector<std::string>> given;
  CLI::App* command = app->add_subcommand(
      "serve",
      "Serve a model over the OpenAI API. JSON flags also take the dotted form --flag.key VALUE.");
  command->add_option("model", options.model.model, "model folder or Hugging Face repository name")
      ->required();
  for (const ServeFlag& flag : ServeFlags()) AddServeFlag(command, flag, &given);
  command->callback([run] {
    *run = [] {
      RETURN_IF_ERROR(ApplyServeFlags(given, &options));
      return RunServe(options);
    };
  });
}

void AddGenerate(CLI::App* app, Run* run) {
  static GenerateOptions options;
  CLI::App* command = app->add_subcommand("generate", "Continue a prompt on the command line");
  AddModelOptions(command, &options.model);
  command->add_option("--prompt,-p", options.prompt, "the text; - reads standard input")
      ->required();
  command->add_flag("--chat", options.chat, "the prompt is a user message");
  command->add_flag("--thinking", options.thinking, "with --chat: think first");
  AddNumber(command, "--max-tokens,-n", &options.max_tokens, 1, 1 << 24,
            "tokens to generate (default 256)");
  AddNumber(command, "--temperature", &options.temperature, 0.0, 2.0, "0: greedy (default 1)");
  AddNumber(command, "--top-p", &options.top_p, 1e-9, 1.0, "(0, 1] (default 1)");
  AddNumber(command, "--top-k", &options.top_k, 0, 1 << 20, "0: off");
  AddSeed(command, "--sampling-seed", &options.sampling_seed, "the same seed gives the same text");
  command->add_flag("--ignore-eos", options.ignore_eos, "go on after an end token");
  command->callback([run] { *run = [] { return RunGenerate(options); }; });
}

void AddChat(CLI::App* app, Run* run) {
  static ChatOptions options;
  CLI::App* command =
      app->add_subcommand("chat", "Chat in the terminal, with line editing and history");
  AddModelOptions(command, &options.model);
  command->add_option("--system", options.system, "system message");
  command->add_flag("--thinking", options.thinking, "think before answering");
  AddChoice(command, "--reasoning-effort", &options.effort, {"low", "high", "max"},
            "with --thinking: how long (default: the model's)");
  AddNumber(command, "--max-tokens,-n", &options.max_tokens, 1, 1 << 24, "tokens of one answer");
  AddNumber(command, "--temperature", &options.temperature, 0.0, 2.0, "0: greedy (default 1)");
  AddNumber(command, "--top-p", &options.top_p, 1e-9, 1.0, "(0, 1] (default 1)");
  command->callback([run] { *run = [] { return RunChat(options); }; });
}

void AddScore(CLI::App* app, Run* run) {
  static ScoreOptions options;
  CLI::App* command = app->add_subcommand("score", "Log-probabilities of given token lists");
  AddModelOptions(command, &options.model);
  command
      ->add_option("--input", options.input,
                   "JSON lines, each {\"tokens\":[…]}; - reads standard input")
      ->required();
  command->add_option("--logits", options.logits,
                      "write FP32 tensors logits.0, logits.1, … here (safetensors)");
  command->add_option("--trace", options.trace,
                      "write routing and index choices and residual streams here (safetensors)");
  command->add_option("--choices", options.choices,
                      "on a GPU: take the routing and index choices of this --trace file");
  command->add_option("--replay", options.replay,
                      "on a GPU: run every layer on the choices and streams of this --trace file");
  AddNumber(command, "--top-logprobs", &options.top_logprobs, 0, 1 << 20,
            "also the K best tokens of every position");
  AddNumber(command, "--chunk", &options.chunk, 1, 1 << 20, "tokens of one prefill chunk");
  AddNumber(command, "--batch", &options.batch, 1, 4096, "sequences run together (default 1)");
  command->callback([run] { *run = [] { return RunScore(options); }; });
}

void AddEncode(CLI::App* app, Run* run) {
  static EncodeCommandOptions options;
  CLI::App* command =
      app->add_subcommand("encode", "Print a conversation as the official encoder renders it");
  command
      ->add_option("--messages", options.messages,
                   "JSON file: a list of messages, or {messages, tools}; - reads standard input")
      ->required();
  AddChoice(command, "--mode", &options.mode, {"thinking", "chat"}, "(default thinking)");
  AddChoice(command, "--effort", &options.effort, {"low", "high", "max"},
            "reasoning effort (default: none said)");
  AddChoice(command, "--effort-profile", &options.effort_profile, {"auto", "preview", "official"},
            "effort prefixes (default auto: read from the checkpoint of --ids)");
  command->add_flag("--keep-thinking", options.keep_thinking,
                    "keep the reasoning of earlier turns");
  command->add_option("--ids", options.ids_model, "print token ids by this model's tokenizer");
  command->add_flag("--raw-special-tokens", options.raw_special_tokens,
                    "with --ids: special-token text from users becomes control tokens, as in the "
                    "official encoder");
  command->callback([run] { *run = [] { return RunEncode(options); }; });
}

void AddSynth(CLI::App* app, Run* run) {
  static SynthOptions options;
  CLI::App* command =
      app->add_subcommand("synth", "Write a synthetic checkpoint in the official format");
  command->add_option("--config", options.config, "flash, pro, tiny, or a config.json")->required();
  AddNumber(command, "--layers", &options.layers, 1, 1000, "keep only the first N layers");
  AddSeed(command, "--seed", &options.seed, "the same seed gives the same bytes (default 0)");
  command->add_option("--out", options.out, "folder to write; must be absent or empty")->required();
  AddNumber(command, "--threads", &options.num_threads, 1, 1024, "default: all usable cores");
  command->callback([run] { *run = [] { return RunSynth(options); }; });
}

void AddParallelOptions(CLI::App* command, config::ParallelConfig* parallel) {
  AddNumber(command, "--tensor-parallel-size", &parallel->tensor_parallel_size, 1, 1024,
            "GPUs that share heads and experts (default 1)");
  AddNumber(command, "--data-parallel-size", &parallel->data_parallel_size, 1, 1024,
            "GPUs, or groups of them, with sequences of their own (default 1)");
  AddNumber(command, "--pipeline-parallel-size", &parallel->pipeline_parallel_size, 1, 1024,
            "stages of layers (default 1)");
  command->add_flag("--enable-expert-parallel", parallel->enable_expert_parallel,
                    "a GPU holds whole experts, not a part of each");
}

void AddLayoutOptions(CLI::App* command, config::ParallelConfig* parallel, std::string* gpu) {
  AddParallelOptions(command, parallel);
  std::vector<std::string> names;
  for (const model::DeviceCeilings& device : model::KnownDevices()) {
    names.push_back(model::DeviceFlag(device));
  }
  AddChoice(command, "--gpu", gpu, names, "(default h200)");
}

// A model whose weights are not needed.
void AddConfigOptions(CLI::App* command, std::string* model, int* layers) {
  command
      ->add_option("model", *model,
                   "model folder, repository name, config.json, flash, pro or tiny")
      ->required();
  AddNumber(command, "--layers", &*layers, 1, 1000, "of a preset: keep only the first N layers");
}

void AddInspect(CLI::App* app, Run* run) {
  static InspectOptions options;
  CLI::App* command =
      app->add_subcommand("inspect", "Parameters, bytes by kind and KV bytes of a model");
  AddConfigOptions(command, &options.model, &options.layers);
  command->add_flag("--roofline", options.roofline,
                    "bytes and FLOPs of a decode step and of a prefill token");
  AddNumber(command, "--batch", &options.batch, 1, 1 << 16,
            "with --roofline: sequences, of each data rank (default 1)");
  AddNumber(command, "--context", &options.context, int64_t{1}, int64_t{1} << 22,
            "with --roofline: tokens (default 4096)");
  AddLayoutOptions(command, &options.parallel, &options.gpu);
  command->callback([run] { *run = [] { return RunInspect(options); }; });
}

void AddPlan(CLI::App* app, Run* run) {
  static PlanOptions options;
  CLI::App* command = app->add_subcommand(
      "plan", "What fits on which GPUs: memory of a layout, or all layouts of --gpus N");
  AddConfigOptions(command, &options.model, &options.layers);
  AddNumber(command, "--gpus", &options.num_gpus, 1, 64, "compare the layouts of N GPUs");
  AddLayoutOptions(command, &options.parallel, &options.gpu);
  AddNumber(command, "--gpu-memory-gib", &options.gpu_memory_gib, 1.0, 65536.0,
            "memory of a GPU, in GiB (default: that GPU's)");
  AddNumber(command, "--gpu-memory-utilization", &options.gpu_memory_utilization, 0.01, 1.0,
            "of it that the server may use (default 0.9)");
  command->add_option("--max-model-len", options.max_model_len,
                      "longest prompt plus output: 32k, 1M; auto: what fits (default auto)");
  AddNumber(command, "--max-num-seqs", &options.max_num_seqs, 1, 1 << 16,
            "sequences that run at once, on each data rank (default 64)");
  AddNumber(command, "--max-num-batched-tokens", &options.max_num_batched_tokens, 1, 1 << 20,
            "tokens of one step, on each data rank (default 8192)");
  command->add_flag("--enable-prefix-caching", options.prefix_caching,
                    "keep memory for snapshots (default on)");
  command->add_flag_callback(
      "--no-enable-prefix-caching", [] { options.prefix_caching = false; }, "do not");
  AddNumber(command, "--streams", &options.num_streams, 1, 1 << 16,
            "requests at once that layouts are compared by (default 64)");
  AddNumber(command, "--input-len", &options.input_len, int64_t{1}, int64_t{1} << 22,
            "tokens of their prompts (default 1024)");
  AddNumber(command, "--output-len", &options.output_len, int64_t{1}, int64_t{1} << 22,
            "tokens of their answers (default 1024)");
  command->add_flag("--json", options.json, "print JSON");
  command->callback([run] { *run = [] { return RunPlan(options); }; });
}

void AddBenchModelOptions(CLI::App* command, ModelOptions* options) {
  AddModelOptions(command, options);
  command->get_option("model")->description(
      "model folder or repository name; flash, pro or tiny with --load-format dummy");
  AddNumber(command, "--num-hidden-layers", &options->num_hidden_layers, 1, 1000,
            "keep only the first N layers (with --load-format dummy)");
  AddParallelOptions(command, &options->parallel);
  command->add_flag("--disable-custom-all-reduce", options->disable_custom_all_reduce,
                    "GPUs gather with NCCL, or through host memory");
}

// What is measured for minutes can be written in the end.
void AddOutputJson(CLI::App* command, std::string* path) {
  command->add_option("--output-json,--json", *path, "write the results here")
      ->check([](const std::string& given) {
        const bool writable = std::ofstream(given, std::ios::app).good();
        return writable ? "" : fmt::format("cannot write {}: {}", given, std::strerror(errno));
      });
}

void AddBenchSteps(CLI::App* bench, const char* name, const char* help, bool has_profile,
                   StepBenchOptions* options, Status (*run_command)(const StepBenchOptions&),
                   Run* run) {
  CLI::App* command = bench->add_subcommand(name, help);
  AddBenchModelOptions(command, &options->model);
  command->get_option("--max-num-batched-tokens")
      ->description("tokens of one step of a prefill (default 8192)");
  AddNumber(command, "--input-len", &options->input_lens, int64_t{1}, int64_t{1} << 24,
            "tokens of a prompt; or several: 32,4096 (default 32)")
      ->delimiter(',');
  AddNumber(command, "--output-len", &options->output_len, 0, 1 << 20,
            "tokens of an answer (default 128)");
  AddNumber(command, "--batch-size", &options->batch_sizes, 1, 4096,
            "sequences; or several: 1,8,32 (default 8)")
      ->delimiter(',');
  AddNumber(command, "--prefill-len", &options->prefill_len, int64_t{0}, int64_t{1} << 24,
            "compute only the last N tokens of each prompt and take those before as cached "
            "(made-up contents); 0: decode only (default: all)");
  AddNumber(command, "--num-iters", &options->num_iters, 1, 1 << 20,
            "runs of each batch (default 10)");
  AddNumber(command, "--num-iters-warmup", &options->num_iters_warmup, 0, 1 << 20,
            "runs before those that count (default 1)");
  AddNumber(command, "--only-rank", &options->model.only_rank, 0, 1023,
            "of --tensor-parallel-size N run this rank alone, 0 to N - 1, on one GPU: what the "
            "others would send is made up, and nobody is waited for");
  if (has_profile) {
    command->add_flag("--profile", options->profile,
                      "also the time of each operator, by its share of the roofline (GPU)");
  }
  AddOutputJson(command, &options->output_json);
  command->callback([=] { *run = [=] { return run_command(*options); }; });
}

void AddBenchThroughput(CLI::App* bench, Run* run) {
  static ThroughputOptions options;
  CLI::App* command = bench->add_subcommand(
      "throughput", "Many requests at once through the whole engine: tokens a second");
  AddBenchModelOptions(command, &options.model);
  AddNumber(command, "--num-prompts", &options.num_prompts, 1, 1 << 20, "requests (default 64)");
  AddNumber(command, "--input-len", &options.input_len, 1, 1 << 24,
            "tokens of a prompt (default 128)");
  AddNumber(command, "--output-len", &options.output_len, 1, 1 << 24,
            "tokens of an answer (default 128)");
  AddNumber(command, "--max-num-seqs", &options.model.max_num_seqs, 1, 4096,
            "requests that run together (default 64)");
  AddNumber(command, "--decode-floor", &options.model.decode_floor, 0.0, 0.95,
            "of its speed alone that an answer keeps while prompts run (default 0.7; 0: "
            "prompts first)");
  AddNumber(command, "--temperature", &options.temperature, 0.0, 2.0, "0: greedy (default 1)");
  command->add_flag("--profile", options.profile,
                    "also the steps' times, and what lies between two decode steps of all "
                    "requests (not with stages)");
  AddOutputJson(command, &options.output_json);
  command->callback([run] { *run = [] { return RunBenchThroughput(options); }; });
}

void AddBenchLoad(CLI::App* bench, Run* run) {
  static LoadBenchOptions options;
  CLI::App* command = bench->add_subcommand(
      "load", "From nothing to ready: the weights' way to the device, and its link's speed");
  AddBenchModelOptions(command, &options.model);
  AddOutputJson(command, &options.output_json);
  command->callback([run] { *run = [] { return RunBenchLoad(options); }; });
}

void AddBench(CLI::App* app, Run* run) {
  static StepBenchOptions latency, kernels;
  latency.model.max_num_batched_tokens = kernels.model.max_num_batched_tokens = 8192;
  CLI::App* bench = app->add_subcommand("bench", "Measure a model on this machine");
  bench->require_subcommand(1);
  AddBenchSteps(bench, "latency",
                "Batches of equal prompts on the model alone: prefill, decode, share of roofline",
                true, &latency, RunBenchLatency, run);
  AddBenchThroughput(bench, run);
  AddBenchSteps(bench, "kernels", "As latency, and each operator by the kind of its layer (GPU)",
                false, &kernels, RunBenchKernels, run);
  AddBenchLoad(bench, run);
}

// An output that is lost, to a full disk say, is a failure whatever the command says. fmt throws
// where it finds out while it prints.
Status RunAndFlush(const Run& run) {
  try {
    RETURN_IF_ERROR(run());
  } catch (const std::exception& error) {
    return InternalError(error.what());
  }
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return OkStatus();
  return InternalError(fmt::format("cannot write the output: {}",
                                   errno == 0 ? "some of it was lost" : std::strerror(errno)));
}

int Main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  const bool is_serve = !args.empty() && args[0] == "serve";
  if (is_serve) {
    auto folded = FoldDottedFlags(args);
    if (!folded.ok()) {
      fmt::print(stderr, "fathom: {}\n", folded.status().message());
      return ExitCode(folded.status());
    }
    args = *std::move(folded);
  }
  CLI::App app("Fathom: an inference server for the DeepSeek-V4 models", "fathom");
  app.set_version_flag("--version", std::string("fathom " FATHOM_VERSION));
  app.require_subcommand(1);
  Run run;
  AddServe(&app, &run);
  AddGenerate(&app, &run);
  AddChat(&app, &run);
  AddScore(&app, &run);
  AddEncode(&app, &run);
  AddSynth(&app, &run);
  AddInspect(&app, &run);
  AddPlan(&app, &run);
  AddBench(&app, &run);
  std::reverse(args.begin(), args.end());  // CLI11 takes them last first
  try {
    app.parse(args);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    fmt::print(stderr, "fathom: {}\n", UsageLine(app, error));
    return 2;
  }
  const Status status = RunAndFlush(run);
  if (!status.ok()) fmt::print(stderr, "fathom: {}\n", status.message());
  return ExitCode(status);
}

}  // namespace
}  // namespace fathom::app

int main(int argc, char** argv) { return fathom::app::Main(argc, argv); }
