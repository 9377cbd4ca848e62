"""Why a model is refused: every code of the frontend, one line each.

HC101  not an ONNX model: the bytes do not parse, or they hold no graph
HC102  the file cannot be read, or it is larger than hybridc reads
HC103  a tensor is malformed: its dimensions and its bytes contradict each other
HC104  external data is refused: outside the model's folder, missing, or beyond the file's end
HC105  an operator of another domain than ONNX's is unknown
HC106  the opset is older or newer than hybridc supports
HC107  a value is defined twice or not at all
HC108  nodes or functions depend on themselves
HC109  the ONNX checker refuses the model
HC110  a type is not supported: sequences, optionals, strings, complex numbers, sparse tensors
HC111  a dimension of an input is unknown
HC112  a given shape or dimension contradicts the model
HC113  operators that hybridc cannot import
HC114  an operator is used in a way that would be computed wrong
HC115  a node could not be imported
HC116  the model could not be simplified
HC117  a shape depends on data
HC118  the model asks for more values or nodes than hybridc makes from so small a file
HC120  for training: the exporter has folded BatchNorm into convolutions
HC121  for training: the exporter has tied weights that are apart, or copied those that are tied
HC122  for training: the model has no parameters that may be trained
"""

NOT_ONNX = "HC101"
UNREADABLE = "HC102"
MALFORMED_TENSOR = "HC103"
EXTERNAL_DATA = "HC104"
UNKNOWN_DOMAIN = "HC105"
UNSUPPORTED_OPSET = "HC106"
BAD_DEFINITION = "HC107"
CYCLE = "HC108"
CHECKER = "HC109"
UNSUPPORTED_TYPE = "HC110"
UNKNOWN_DIMENSION = "HC111"
CONTRADICTED_SHAPE = "HC112"
MISSING_OPERATOR = "HC113"
WRONG_RESULT = "HC114"
IMPORT_FAILED = "HC115"
SIMPLIFY_FAILED = "HC116"
DATA_DEPENDENT_SHAPE = "HC117"
TOO_LARGE = "HC118"
FOLDED_NORM = "HC120"
CHANGED_TIES = "HC121"
NO_PARAMETERS = "HC122"
