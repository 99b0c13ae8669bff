#include "apps/fathom/serve_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "apps/fathom/flag_builders.h"

namespace fathom::app {
namespace {

using Values = FlagValues;
using Apply = ApplyFlag;

template <typename T>
Apply SetModelNumber(T ModelOptions::* member, T low, T high, const char* flag) {
  return [=](const Values& values, ServeOptions& options) -> Status {
    ASSIGN_OR_RETURN(options.model.*member, ParseNumber<T>(values[0], low, high, flag));
    return OkStatus();
  };
}

template <typename E>
Apply SetEnum(E ModelOptions::* member, const char* flag,
              std::type_identity_t<Choices<E>> choices) {
  return [=](const Values& values, ServeOptions& options) -> Status {
    if (const auto choice = ToChoice(values[0], choices)) {
      options.model.*member = *choice;
      return OkStatus();
    }
    return InvalidArgument(
        fmt::format("--{}: {}", flag, NotAvailable(values[0], NamesOf(choices))));
  };
}

Status ApplyKvCacheDType(const Values& values, ServeOptions&) {
  for (const char* name : {"auto", "fp8", "fp8_e4m3", "fp8_ds_mla"}) {
    if (values[0] == name) return OkStatus();
  }
  return InvalidArgument(fmt::format(
      "--kv-cache-dtype: '{}' is not available; KV entries are FP8 with BF16 rope: use fp8 or auto",
      values[0]));
}

Status ApplyMaxModelLen(const Values& values, ServeOptions& options) {
  if (values[0] == "auto" || values[0] == "-1") {
    options.model.max_model_len = 0;
    return OkStatus();
  }
  ASSIGN_OR_RETURN(options.model.max_model_len, ParseSize(values[0], "max-model-len"));
  return OkStatus();
}

Status ApplyAttentionConfig(const Values& values, ServeOptions& options) {
  ASSIGN_OR_RETURN(const json::Value config, ParseObject(values[0], "attention-config"));
  for (const json::Member& member : config.members()) {
    const json::Value& value = member.value;
    if (member.key == "use_fp4_indexer_cache" && value.is_bool()) {
      options.model.index_dtype =
          value.AsBool() ? kv_cache::IndexKeyDType::kFp4 : kv_cache::IndexKeyDType::kFp8;
    } else if (member.key == "indexer_kv_dtype" && value.is_string() &&
               (value.AsString() == "fp4" || value.AsString() == "fp8")) {
      options.model.index_dtype =
          value.AsString() == "fp4" ? kv_cache::IndexKeyDType::kFp4 : kv_cache::IndexKeyDType::kFp8;
    } else {
      return InvalidArgument(
          fmt::format("--attention-config.{} {} is not available; it takes use_fp4_indexer_cache "
                      "true or false, or "
                      "indexer_kv_dtype fp4 or fp8",
                      member.key, json::Dump(value)));
    }
  }
  return OkStatus();
}

Status ApplySpeculativeConfig(const Values& values, ServeOptions& options) {
  ASSIGN_OR_RETURN(const json::Value config, ParseObject(values[0], "speculative-config"));
  const json::Value* method = config.Find("method");
  if (method == nullptr || !method->is_string() ||
      (method->AsString() != "mtp" && method->AsString() != "dspark")) {
    return InvalidArgument("--speculative-config.method must be mtp or dspark");
  }
  options.speculative_method = method->AsString();
  return OkStatus();
}

Status ApplyDefaultKwargs(const Values& values, ServeOptions& options) {
  ASSIGN_OR_RETURN(options.default_chat_template_kwargs,
                   ParseObject(values[0], "default-chat-template-kwargs"));
  return OkStatus();
}

Status ApplyOverrideGenerationConfig(const Values& values, ServeOptions& options) {
  ASSIGN_OR_RETURN(options.override_generation_config,
                   ParseObject(values[0], "override-generation-config"));
  return OkStatus();
}

void AddChatFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(
      Works("default-chat-template-kwargs", "JSON",
            "defaults under each request's chat_template_kwargs (thinking, reasoning_effort)",
            ApplyDefaultKwargs, FlagKind::kJson));
  flags->push_back(
      Works("effort-profile", "NAME",
            "effort prefixes: auto, preview or official (default auto: read from the checkpoint)",
            [](const Values& v, ServeOptions& o) -> Status {
              RETURN_IF_ERROR(OneOf("effort-profile", {"auto", "preview", "official"})(v, o));
              o.effort_profile = v[0];
              return OkStatus();
            }));
  flags->push_back(Works(
      "raw-special-tokens", "",
      "let special-token text from users become control tokens, as the official encoder does",
      [](const Values& v, ServeOptions& o) {
        o.raw_special_tokens = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch));
  flags->push_back(Works("generation-config", "auto|vllm",
                         "sampling defaults from generation_config.json (auto), or none (vllm)",
                         [](const Values& v, ServeOptions& o) -> Status {
                           RETURN_IF_ERROR(OneOf("generation-config", {"auto", "vllm"})(v, o));
                           o.use_generation_config = v[0] == "auto";
                           return OkStatus();
                         }));
  flags->push_back(Works("override-generation-config", "JSON", "sampling defaults on top of those",
                         ApplyOverrideGenerationConfig, FlagKind::kJson));
  flags->push_back(NoEffect("tokenizer-mode", FlagKind::kValue, "the V4 encoder is built in",
                            OneOf("tokenizer-mode", {"auto", "deepseek_v4"})));
  flags->push_back(NoEffect("reasoning-parser", FlagKind::kValue,
                            "the V4 parser is built in and always on",
                            OneOf("reasoning-parser", {"deepseek_v4"})));
  flags->push_back(NoEffect("tool-call-parser", FlagKind::kValue, "the V4 parser is built in",
                            OneOf("tool-call-parser", {"deepseek_v4"})));
  flags->push_back(NoEffect("enable-auto-tool-choice", FlagKind::kSwitch, "always on"));
  flags->push_back(NoEffect("reasoning-config", FlagKind::kJson, "the V4 tags are built in"));
  flags->push_back(
      NoEffect("trust-remote-code", FlagKind::kSwitch, "no code is ever run from a checkpoint"));
  flags->push_back(NoEffect("enable-prompt-tokens-details", FlagKind::kSwitch, "always on"));
  flags->push_back(
      NoEffect("disable-uvicorn-access-log", FlagKind::kSwitch, "there is no access log"));
  flags->push_back(NoEffect("disable-log-requests", FlagKind::kSwitch, "requests are not logged"));
  flags->push_back(Refused("chat-template", FlagKind::kValue,
                           "the V4 encoding is built in and templates are never run"));
}

void AddModelFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(Works("device", "NAME", "auto, cpu or cuda (default auto)",
                         SetEnum(&ModelOptions::device, "device", kDevices)));
  flags->push_back(Works("numerics", "NAME", "official or fp32 (default official)",
                         SetEnum(&ModelOptions::numerics, "numerics", kNumerics)));
  flags->push_back(
      Works("load-format", "NAME", "auto, or dummy: synthetic weights without files",
            [](const Values& v, ServeOptions& o) -> Status {
              RETURN_IF_ERROR(OneOf("load-format", {"auto", "safetensors", "dummy"})(v, o));
              o.model.load_format = v[0] == "dummy" ? LoadFormat::kDummy : LoadFormat::kAuto;
              return OkStatus();
            }));
  flags->push_back(Works("seed", "N",
                         "of dummy weights, and of requests that bring none (default 0)",
                         SetModelNumber<uint64_t>(&ModelOptions::seed, 0, UINT64_MAX, "seed")));
  flags->push_back(Works("threads", "N", "CPU threads (default: all usable cores)",
                         SetModelNumber(&ModelOptions::num_threads, 1, 1024, "threads")));
  flags->push_back(
      Works("max-model-len", "N|auto",
            "longest prompt plus output: 32k, 1M; auto: what a GPU's KV cache holds, 32k "
            "on a CPU (default auto)",
            ApplyMaxModelLen));
  flags->push_back(Works("max-num-seqs", "N", "sequences that run at once (default 64)",
                         SetModelNumber(&ModelOptions::max_num_seqs, 1, 65536, "max-num-seqs")));
  flags->push_back(Works(
      "max-num-batched-tokens", "N",
      "tokens of one step, at least --max-num-seqs, at most 65535 on a GPU (default 8192 there, "
      "2048 "
      "on a CPU)",
      SetModelNumber(&ModelOptions::max_num_batched_tokens, 1, 1 << 20, "max-num-batched-tokens")));
  flags->push_back(Works("decode-floor", "SHARE",
                         "of its speed alone that an answer keeps while prompts run, 0 to 0.95 "
                         "(default 0.7; 0: prompts first, for throughput)",
                         SetModelNumber(&ModelOptions::decode_floor, 0.0, 0.95, "decode-floor")));
  flags->push_back(
      Works("attention-config", "JSON",
            "use_fp4_indexer_cache true (default) or false; indexer_kv_dtype fp4 or fp8",
            ApplyAttentionConfig, FlagKind::kJson));
  flags->push_back(NoEffect("kv-cache-dtype", FlagKind::kValue,
                            "entries are FP8 with BF16 rope, always", ApplyKvCacheDType));
  flags->push_back(NoEffect("block-size", FlagKind::kValue, "a block is 256 tokens",
                            OneOf("block-size", {"256"})));
  flags->push_back(NoEffect("dtype", FlagKind::kValue, "the checkpoint's types are kept",
                            OneOf("dtype", {"auto", "bfloat16"})));
  flags->push_back(NoEffect("quantization", FlagKind::kValue, "the checkpoint's types are kept",
                            OneOf("quantization", {"fp8", "deepseek_v4_fp8"})));
  flags->push_back(
      NoEffect("speculative-config", FlagKind::kJson,
               "drafts are checked against the checkpoint but not run yet: one token a step",
               ApplySpeculativeConfig));
}

void AddExecutionFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(NoEffect("enable-chunked-prefill", FlagKind::kSwitch, "always on"));
  ServeFlag async_scheduling = Works(
      "async-scheduling", "", "plan and start a step while the one before runs (default: on a GPU)",
      [](const Values& v, ServeOptions& o) {
        o.model.async_scheduling = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch);
  async_scheduling.negatable = true;
  flags->push_back(std::move(async_scheduling));
  flags->push_back(NoEffect("scheduler-reserve-full-isl", FlagKind::kSwitch,
                            "a request is admitted when its whole prompt fits", nullptr, true));
  flags->push_back(NoEffect("disable-hybrid-kv-cache-manager", FlagKind::kSwitch,
                            "every kind of entry has a pool of its own", nullptr, true));
  flags->push_back(NoEffect("enable-flashinfer-autotune", FlagKind::kSwitch,
                            "nothing is tuned at run time", nullptr, true));
  flags->push_back(Works(
      "enforce-eager", "",
      "on a GPU, launch the operators of a decode step one by one, not as a graph",
      [](const Values& v, ServeOptions& o) {
        o.model.enforce_eager = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch));
  flags->push_back(NoEffect("disable-log-stats", FlagKind::kSwitch, "statistics cost nothing"));
  for (const char* name : {"attention-backend", "moe-backend", "linear-backend"}) {
    flags->push_back(NoEffect(name, FlagKind::kValue, "the kernels are built in"));
  }
  flags->push_back(NoEffect("kernel-config", FlagKind::kJson, "the kernels are built in"));
  flags->push_back(
      NoEffect("compilation-config", FlagKind::kJson, "nothing is compiled at run time"));
  flags->push_back(NoEffect("max-cudagraph-capture-size", FlagKind::kValue,
                            "decodes of up to --max-num-seqs sequences are captured"));
  flags->push_back(
      NoEffect("swap-space", FlagKind::kValue, "a preempted request is computed again"));
  flags->push_back(
      Refused("kv-transfer-config", FlagKind::kJson,
              "this build does not split prefill and decode; run one server for both"));
}

}  // namespace

const std::vector<ServeFlag>& ServeFlags() {
  static const std::vector<ServeFlag> flags = [] {
    std::vector<ServeFlag> all;
    AddApiFlags(&all);
    AddModelFlags(&all);
    AddKvFlags(&all);
    AddChatFlags(&all);
    AddParallelFlags(&all);
    AddExecutionFlags(&all);
    return all;
  }();
  return flags;
}

namespace {

const ServeFlag* FindJsonFlag(const std::string& name) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (flag.name == name && flag.kind == FlagKind::kJson) return &flag;
  }
  return nullptr;
}

// `true`, `2` and `{"a":1}` are JSON; everything else, and Python's True and False, is taken as
// they mean it.
json::Value ParseScalar(const std::string& text) {
  if (text == "True") return json::Value::Bool(true);
  if (text == "False") return json::Value::Bool(false);
  auto value = json::Parse(text);
  return value.ok() ? *std::move(value) : json::Value::String(text);
}

void SetPath(json::Value* object, std::string_view path, json::Value value) {
  const size_t dot = path.find('.');
  if (dot == std::string_view::npos) {
    object->Set(path, std::move(value));
    return;
  }
  const std::string_view key = path.substr(0, dot);
  if (object->Find(key) == nullptr || !object->Find(key)->is_object()) {
    object->Set(key, json::Value::Object());
  }
  SetPath(object->Find(key), path.substr(dot + 1), std::move(value));
}

}  // namespace

namespace {

// vLLM's names of one dash and two letters, which CLI11 would read as two flags.
std::string LongName(const std::string& arg) {
  static const std::map<std::string, std::string> names = {{"-tp", "--tensor-parallel-size"},
                                                           {"-dp", "--data-parallel-size"},
                                                           {"-pp", "--pipeline-parallel-size"},
                                                           {"-ep", "--enable-expert-parallel"}};
  const size_t name_end = std::min(arg.find('='), arg.size());
  const auto found = names.find(arg.substr(0, name_end));
  return found == names.end() ? arg : found->second + arg.substr(name_end);
}

}  // namespace

Result<std::vector<std::string>> FoldDottedFlags(std::span<const std::string> args) {
  std::vector<std::string> out;
  std::map<std::string, size_t> position;  // of a kJson flag's value in `out`
  std::map<std::string, json::Value> folded;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string arg = LongName(args[i]);
    if (!arg.starts_with("--")) {
      out.push_back(arg);
      continue;
    }
    const size_t name_end = std::min(arg.find_first_of(".="), arg.size());
    std::string name = arg.substr(2, name_end - 2);
    std::replace(name.begin(), name.end(), '_', '-');
    if (FindJsonFlag(name) == nullptr) {
      out.push_back("--" + name + arg.substr(name_end));
      continue;
    }
    const size_t equals = arg.find('=', name_end);
    const std::string path =
        arg[name_end == arg.size() ? 0 : name_end] == '.'
            ? arg.substr(name_end + 1, equals == std::string::npos ? equals : equals - name_end - 1)
            : "";
    if (equals == std::string::npos && i + 1 == args.size()) {
      return InvalidArgument(fmt::format("{} needs a value", arg));
    }
    const std::string text = equals == std::string::npos ? args[++i] : arg.substr(equals + 1);
    if (!position.contains(name)) {
      out.push_back("--" + name);
      position[name] = out.size();
      out.emplace_back();
      folded[name] = json::Value::Object();
    }
    if (path.empty()) {
      ASSIGN_OR_RETURN(const json::Value whole, ParseObject(text, name.c_str()));
      for (const json::Member& member : whole.members()) folded[name].Set(member.key, member.value);
    } else {
      SetPath(&folded[name], path, ParseScalar(text));
    }
    out[position[name]] = json::Dump(folded[name]);
  }
  return out;
}

std::string ServeFlagsMarkdown() {
  std::string out = "| flag | effect | meaning |\n|---|---|---|\n";
  for (const ServeFlag& flag : ServeFlags()) {
    const char* effect = flag.effect == FlagEffect::kWorks      ? "works"
                         : flag.effect == FlagEffect::kNoEffect ? "accepted without effect"
                                                                : "refused";
    std::string value = flag.kind == FlagKind::kSwitch ? "" : " " + flag.value_name;
    std::replace(value.begin(), value.end(), '|', '/');
    out += fmt::format("| `--{}{}{}` | {} | {} |\n", flag.negatable ? "[no-]" : "", flag.name,
                       value, effect, flag.help);
  }
  return out;
}

}  // namespace fathom::app
