# cmake -DINPUT=text-file -DOUTPUT=file.cc -DHEADER=include -DSYMBOL=kName -DNAMESPACE=name -P EmbedFile.cmake:
# defines a std::string_view of the file's text. The file holds no NUL and no `)fathom"`.
file(READ "${INPUT}" text)
file(WRITE "${OUTPUT}" "#include \"${HEADER}\"
namespace fathom::${NAMESPACE} {
const std::string_view ${SYMBOL} = R\"fathom(${text})fathom\";
}
")
