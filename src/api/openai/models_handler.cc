#include <algorithm>
#include <utility>

#include "api/openai/answer_format.h"
#include "api/openai/handlers.h"

namespace fathom::api::openai {
namespace {

using json::Value;

Value ModelCard(const ServerContext& context, const std::string& name) {
  return Value::Object({{"id", Text(name)},
                        {"object", Text("model")},
                        {"created", Integer(context.start_time)},
                        {"owned_by", Text("fathom")},
                        {"root", Text(context.model.root)},
                        {"parent", Value()},
                        {"max_model_len", Integer(context.engine.max_model_len())},
                        {"permission", Value::Array()}});
}

}  // namespace

void HandleModels(const ServerContext& context, const http::Request&, const Writer& writer) {
  std::vector<Value> cards;
  for (const std::string& name : context.options.served_model_names)
    cards.push_back(ModelCard(context, name));
  writer->Send(JsonResponse(
      Value::Object({{"object", Text("list")}, {"data", Value::Array(std::move(cards))}})));
}

void HandleModel(const ServerContext& context, const http::Request& request, const Writer& writer) {
  const std::vector<std::string>& names = context.options.served_model_names;
  if (std::find(names.begin(), names.end(), request.path_tail) != names.end()) {
    return writer->Send(JsonResponse(ModelCard(context, request.path_tail)));
  }
  writer->Send(ErrorResponse(ModelNotFound(request.path_tail, names)));
}

void HandleResetPrefixCache(const ServerContext& context, const http::Request&,
                            const Writer& writer) {
  if (!context.options.allow_cache_reset) {
    return writer->Send(
        ErrorResponse({.status = 403,
                       .message = "The prefix cache can be reset on a server that was started with "
                                  "--enable-cache-reset.",
                       .param = "",
                       .code = "not_allowed"}));
  }
  context.engine.ResetPrefixCache();
  writer->Send({.headers = {}, .body = ""});
}

}  // namespace fathom::api::openai
