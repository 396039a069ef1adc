"""Common English words for prompts. Most are one token of any tokenizer, and none is a special token."""

_TEXT = """
about above across after again against air all almost along also always among animal answer any apart appear
apple arm around art ask autumn away back bad bag ball bank base bath bear beautiful because become bed before
began behind believe bell below best better between big bird black blood blow blue board boat body bone book
both bottom box boy branch bread break bridge bright bring broad brother brown build burn bus business busy buy
cake call came camp capital car card care carry case cat catch cause cell center century certain chair chance
change chart check child choose church circle city class clean clear climb clock close cloth cloud coast coat
cold color column come common company compare complete consider contain control cook cool copper copy corn
corner correct cost cotton could count country course cover cow cross crowd cry current cut dance danger dark
day dead deal dear death decide deep degree depend describe desert design develop differ difficult dinner direct
discuss distant divide doctor dog dollar door double down draw dream dress drink drive drop dry during each
early earth east easy eat edge effect egg eight electric end enemy energy engine enough enter equal even event
ever every exact example except excite exercise expect experience experiment explain eye face fact fall family
famous far farm fast father favor fear feed feel feet fell few field fight figure fill final find fine finger
finish fire first fish flat floor flow flower fly follow food foot force forest form forward found four fraction
free fresh friend front fruit full fun game garden gas gather general gentle girl give glad glass gold gone good
govern grand grass great green grew ground group grow guess guide gun hair half hand happen happy hard hat head
hear heart heat heavy help here high hill history hit hold hole home hope horse hot hour house human hundred
hunt hurry ice idea imagine inch include industry insect instant instrument interest invent iron island job join
joy jump just keep key kind king knew know lady lake land language large last late laugh law lay lead learn
least leave left leg length less letter level life lift light like line liquid list listen little live locate
log long look lost loud love low machine magnet main make man many map mark market mass master match material
matter mean measure meat meet melody men metal method middle might mile milk million mind mine minute miss mix
modern molecule moment money month moon more morning most mother motion mount mountain mouth move much music
must name nation natural nature near necessary neck need neighbor never new next night nine noise noon north
nose note nothing notice noun now number object observe occur ocean offer office often oil old once only open
operate opposite orange order original other own oxygen page paint pair paper parent part party pass past path
pattern pay people perhaps period person phrase piano pick picture piece pitch place plain plan plane planet
plant play please plural poem point poor populate port pose position possible post pound power practice prepare
present press pretty print probable problem process produce product proper property protect prove provide pull
push quart question quick quiet quite race radio rail rain raise ran range rather reach read ready real reason
receive record red region remember repeat reply represent require rest result rich ride right ring rise river
road rock room root rope rose round row rub rule run safe sail salt same sand save say scale school science
score sea search season seat second section see seed seem segment select self sell send sense sentence separate
serve set settle seven several shall shape share sharp sheet shell shine ship shoe shop shore short should
shoulder shout show side sight sign silent silver similar simple since sing single sister sit six size skill
skin sky sleep slip slow small smell smile snow soft soil soldier solution solve some son song soon sound south
space speak special speech speed spell spend spoke spot spread spring square stand star start state station stay
stead steam steel step stick still stone stood stop store story straight strange stream street stretch string
strong student study subject substance subtract success sudden suffix sugar suggest suit summer sun supply
support sure surface surprise swim syllable symbol system table tail take talk tall teach team teeth tell
temperature ten term test thank thick thin thing think third thought thousand three through throw tie time tiny
tire together told tone tool top total touch toward town track trade train travel tree triangle trip trouble
truck true try tube turn twenty two type under unit until usual valley value vary very view village visit voice
vowel wait walk wall want war warm wash watch water wave way wear weather week weight west wheel when where
which while white whole wide wife wild will wind window wing winter wire wish woman wonder wood word work world
worry would write wrong yard year yellow yes yet young
"""

WORDS = _TEXT.split()
